"""What is trained: mathematics and configuration. No sockets, clocks or threads.

`swarm` imports neither `peers` nor `dht`.
"""
