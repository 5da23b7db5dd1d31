// delay MILLISECONDS
//
// A cable with a one-way delay, for kernels without netem: what arrives at device `near` leaves at device `far`
// that much later, what arrives at `far` leaves at `near` at once. Both are in this network namespace and have no
// address. Frames keep their unfinished checksums and segmentation marks (virtio header), so that offloads work.
// Build: cc -O2 -o delay delay.c
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_HELD (1 << 16)
#define FRAME_BYTES (1 << 17)
#define SECOND_NS 1000000000L

struct held {
    long due_ns;
    int nbytes;
    char *data;
};

static struct held ring[MOST_HELD];
static unsigned head, tail;

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND_NS + t.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int open_device(const char *name) {
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, htons(ETH_P_ALL));
    int on = 1, room = 32 << 20;
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(name)};
    struct packet_mreq promiscuous = {.mr_ifindex = address.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    if (fd < 0 || !address.sll_ifindex) fail(name);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    if (setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) ||
        setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) ||
        setsockopt(fd, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &promiscuous, sizeof promiscuous) ||
        bind(fd, (void *)&address, sizeof address))
        fail(name);
    return fd;
}

static void put(int fd, const char *data, int nbytes) {
    if (send(fd, data, nbytes, 0) < 0) perror("delay: send");
}

int main(int argc, char **argv) {
    double milliseconds;
    if (argc != 2 || sscanf(argv[1], "%lf", &milliseconds) != 1) {
        fprintf(stderr, "usage: delay MILLISECONDS\n");
        return 2;
    }
    long delay_ns = milliseconds * 1e6;
    prctl(PR_SET_TIMERSLACK, 20000L);
    prctl(PR_SET_PDEATHSIG, 9);
    struct sched_param first = {.sched_priority = 2};
    sched_setscheduler(0, SCHED_RR, &first);  // a cable does not wait for a free processor
    struct pollfd ends[2] = {{open_device("near"), POLLIN, 0}, {open_device("far"), POLLIN, 0}};
    static char frame[FRAME_BYTES];
    puts("ready");
    fflush(stdout);
    for (;;) {
        long now = now_ns();
        for (; tail != head && ring[tail % MOST_HELD].due_ns <= now; tail++) {
            struct held *held = &ring[tail % MOST_HELD];
            put(ends[1].fd, held->data, held->nbytes);
            free(held->data);
        }
        long wait = tail == head ? SECOND_NS : ring[tail % MOST_HELD].due_ns - now_ns();
        struct timespec timeout = {0, wait < 0 ? 0 : wait >= SECOND_NS ? SECOND_NS - 1 : wait};
        if (ppoll(ends, 2, &timeout, NULL) <= 0) continue;
        int nbytes;
        while ((nbytes = recv(ends[1].fd, frame, sizeof frame, 0)) > 0) put(ends[0].fd, frame, nbytes);
        while (head - tail < MOST_HELD && (nbytes = recv(ends[0].fd, frame, sizeof frame, 0)) > 0) {
            char *data = malloc(nbytes);
            if (!data) fail("delay: memory");
            memcpy(data, frame, nbytes);
            ring[head++ % MOST_HELD] = (struct held){now_ns() + delay_ns, nbytes, data};
        }
    }
}
