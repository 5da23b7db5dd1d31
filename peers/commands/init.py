"""`swarm-peer init`: create a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import tyro

from peers.commands.options import CommandOptions, check_exists
from peers.config import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from swarm.manifest import RunManifest

DESCRIPTION = """\
Create a run: load a pretrained causal LM, cut it into stages of about equal cost, pack the data into rows of
tokens, fit the codec to the model's own activations, and sign the manifest with a new owner key.

RUN_DIR gets manifest.yaml, owner.key (keep it: who holds it owns the run) and artifacts/, everything that
peers fetch. It appears only when it is complete. Input and output embeddings that share one matrix are untied
at the cut (the first stage trains one, the last the other), and the checkpoint that `export` writes is untied.

Examples:
  swarm-peer init my-run --model smollm2-135m --data stdlib
  swarm-peer init my-run --model HuggingFaceTB/SmolLM2-1.7B --data roneneldan/TinyStories --stages 8
  swarm-peer init my-run --model ./model --data ./texts --codec mask --mask-ratio 95 --steps 1000
  swarm-peer init my-run --model model.gguf --data notes.jsonl --text-field body --freeze embedding head

With --grant-anchor or --revoke-anchor an existing run gets other anchors instead, also while it trains:
  swarm-peer init my-run --grant-anchor 12D3Koo...
The grant is signed with the owner's key and put into RUN_DIR; a seed that serves this folder passes it on within
seconds, and the peers to one another.
"""

Progress = Callable[[str, float, float | None], None]
"""progress(phase, done, total): total None where it is not known."""

DEFAULT_PREDICTION: Literal["none", "token", "context"] = "context"
"""Of new runs with codec basis."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommandOptions):
    """What a run fixes; shared by init and local."""

    model: str = "smollm2-135m"
    """smollm2-135m (in the `demo` extra), a Hugging Face name, a folder with a checkpoint, or a .gguf file."""

    data: str = "stdlib"
    """stdlib (sources of Python's standard library), a text file or folder, JSON Lines, or a Hugging Face data set."""

    data_kind: Literal["auto", "stdlib", "text", "jsonl", "hub"] = "auto"
    """How --data is read."""

    text_field: str = "text"
    """Field or column of the text, for JSON Lines and Hugging Face data sets."""

    split: str = "train"
    """Split of a Hugging Face data set."""

    subset: str | None = None
    """Subset (configuration) of a Hugging Face data set."""

    max_documents: int | None = None
    """Read at most this many documents."""

    max_tokens: int | None = None
    """Stop packing after this many tokens."""

    heldout_percent: int = 5
    """Percent of the documents that are never trained on."""

    stages: int = 4
    """Stages the model is cut into."""

    cuts: tuple[int, ...] = ()
    """First layers of stages 1, 2, ..., instead of cuts of equal cost."""

    replicas: int = 2
    """Peers per stage that must be there before the first step (local starts as many)."""

    steps: int = 100
    """Training steps of the run."""

    samples_per_step: int = 16
    """Packed rows per step, over all sources together."""

    rows_per_microbatch: int = 1
    """Packed rows in a microbatch."""

    sequence_length: int = 1024
    """Tokens in a packed row."""

    codec: Literal["basis", "mask", "dense"] = "basis"
    """What crosses a boundary: 1 to 8 bits per coordinate in fitted bases, a random mask, or everything."""

    mask_ratio: float | None = None
    """Percent of a boundary's bytes not sent: 90 sends 10%. Without it, 90 for basis and 95 for mask."""

    codec_values: Literal["bf16", "int8", "fp32"] | None = None
    """Number format of mask (bf16, int8, fp32) and dense (bf16, fp32) on the wire; bf16 without it."""

    mask_fill: Literal["zero", "mean"] = "zero"
    """mask: what the receiver puts where nothing was sent."""

    mask_rescale: Literal["none", "const", "rms"] = "none"
    """mask: factor on the values that were sent."""

    calibration_microbatches: int = 32
    """basis: microbatches that run through the model once, unmasked, to fit the bases."""

    prediction: Literal["none", "token", "context"] | None = None
    """basis: what hidden states are predicted from, so that only the rest is sent; context without it."""

    averaging: Literal[
        "fp32",
        "fp16",
        "bf16",
        "int8",
        "fp8",
        "e3m0",
        "sign",
        "topk",
        "dgc",
        "randomk",
        "powersgd",
        "scape",
    ] = "fp16"
    """What replicas average: the gradient as floats (fp32, fp16, bf16), in 8 (int8, fp8), 4 (e3m0) or 1 bit (sign); its
    largest values (topk; dgc, for sgd), random ones (randomk), those its first moment names (scape, for adams), or
    low-rank factors (powersgd). What is left out comes with the next step."""

    averaging_ratio: float | None = None
    """topk, dgc, randomk, scape: share of the values that is sent. powersgd: how many times less is sent."""

    averaging_rank: int | None = None
    """powersgd: rank of the factors; 4 without it."""

    averaging_options: tuple[str, ...] = ()
    """More of the compressor's options, as NAME=VALUE: error_feedback=false, momentum=0.9 (dgc), block=64 (int8)..."""

    outer: Literal["every_step", "local_sgd", "diloco", "streaming_diloco", "sparta", "gasloc"] = "every_step"
    """When replicas average. every_step: gradients, at every step. local_sgd: their weights, every so many steps of
    their own. diloco: the same with an outer optimizer. streaming_diloco: a fragment of the stage at a time. sparta:
    one random slice of the weights after another. gasloc: in random pairs, all of them now and then."""

    outer_every: int | None = None
    """Other than every_step: steps from one average of a weight to the next (gasloc: to the next pair); 20 without
    it."""

    outer_overlap: int = 0
    """Steps that are trained while an average travels: it is applied after the last of them. every_step: 0 or 1."""

    outer_options: tuple[str, ...] = ()
    """More of the outer loop's options, as NAME=VALUE: learning_rate=0.7, momentum=0.9, fragments=4, keep_local=0.5,
    coupling=1.0, consensus=10 (gasloc)."""

    norm_bound: float | None = 10.0
    """A replica's part is left out if its norm is over so many times the median of three or more; none takes any."""

    centered_clip: float | None = None
    """Average by CenteredClip: parts count up to so many times their median distance from the centre. Else the mean."""

    optimizer: Literal["adamw", "adams", "sgd"] = "adamw"
    """Optimizer of every stage; adams keeps the first moment only."""

    learning_rate: float = 3e-4
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    warmup_steps: int = 0
    """Steps of linear warm-up."""

    weight_decay: float = 0.0
    """Decoupled decay of matrices per unit of learning rate."""

    momentum: float = 0.0
    """sgd: momentum."""

    clip_norm: float | None = 1.0
    """Bound of the model's gradient norm; none switches clipping off."""

    freeze: tuple[Literal["embedding", "head", "norms"], ...] = ()
    """Parts that are not trained."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """Number format in which stages compute, fp32 in place of bf16 on CPUs without instructions for it; master weights
    are fp32."""

    weights: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the initial weights that peers fetch; auto keeps the model's own."""

    anchor_peers: tuple[str, ...] = ()
    """Peer ids of the run's anchors, which publish priors while it trains (`swarm-peer identity` makes one). Of two
    anchors' priors for one step, that of the first named here counts."""

    anchor_microbatches: int = 8
    """Microbatches an anchor passes unmasked through a snapshot for one set of priors."""

    corrector: Literal["none", "spectral", "one_sided", "signed", "bias", "additive"] = "none"
    """What corrects averaged gradients by the clean ones that anchors memorise: the paper's filter (spectral), one
    that filters the shorter side only, or mixtures that trust the prior (signed, bias, additive)."""

    corrector_alpha: float | None = None
    """Share of the raw gradient that stays; 1 corrects nothing. Without it 0.3, for additive 0.95."""

    corrector_rank: int | None = None
    """Singular triplets of a matrix's prior, 0 for all of them; 64 without it."""

    corrector_beta: float | None = None
    """Decay of the anchors' memory at each clean gradient; 0.95 without it."""

    corrector_tau: float | None = None
    """spectral, one_sided: singular value at which a direction passes half; 0.001 without it."""

    corrector_tau_relative: bool = False
    """spectral, one_sided: tau is a share of the matrix's largest singular value."""

    corrector_max_staleness: int | None = None
    """Steps after which a prior counts for nothing (it fades from half of them on); 30 without it."""

    corrector_side: Literal["shorter", "left", "right"] | None = None
    """one_sided: the side of a matrix that is filtered; shorter without it."""

    priors: Literal["anchors", "leaders"] = "anchors"
    """Who renews what the codec knows of a boundary: anchors, or peers of its two stages, from what they train. Without
    anchors anybody who trains can make it useless."""

    prior_every: int = 5
    """Steps between two priors of leaders."""

    snapshot_every: int = 20
    """Steps between two snapshots that peers keep and serve."""

    seed: int = 0
    """Seed of the sample order and the random masks."""

    name: str | None = None
    """Name of the run, for people; without it, the folder's name."""

    threads: int | None = None
    """Torch threads; without it, one per core."""


@dataclass(frozen=True, kw_only=True)
class InitOptions(RunOptions):
    """Create a run."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder to make: new, or empty; an existing run to explain it, or to grant or revoke its anchors."""

    grant_anchor: tuple[str, ...] = ()
    """Name these peer ids as anchors of the existing run in RUN_DIR, after those it has (needs its owner.key)."""

    link_mbps: float = 200.0
    """Mbit/s of the crowd's slower lines, for advice on the mask ratio and the averages; changes nothing."""

    stage_us_per_token: float | None = None
    """Microseconds a stage of the crowd's machines takes per token, for that advice; without it, this machine's."""

    explain: bool = False
    """Print, stage by stage, what a replica sends in a step, and the share of a line of --link-mbps that this takes;
    of the run that is made, or of the existing run in RUN_DIR, which stays as it is."""

    revoke_anchor: tuple[str, ...] = ()
    """Priors of these anchors of the existing run in RUN_DIR count no more; what is in force stays until replaced."""


class CreateRun(Protocol):
    """Signature of `create_run`."""

    def __call__(self, options: RunOptions, run_dir: Path, progress: Progress | None = None) -> RunManifest:
        """See `create_run`."""


def create_run(options: RunOptions, run_dir: Path, progress: Progress | None = None) -> RunManifest:
    """Make a run's folder and return its signed manifest. Imports torch and transformers.

    Raises UserError, DataError, ModelSourceError or NoPipelinePlan for what the user can mend; nothing is
    left behind after any failure.
    """
    from peers.commands.build import build_run

    return build_run(options, run_dir, progress)


def check_target(run_dir: Path) -> None:
    """Raise UserError unless a run can be made at `run_dir`."""
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        if not (run_dir / "manifest.yaml").exists():
            raise UserError(f"{run_dir} exists already and is no run: give another folder")
        raise UserError(
            f"{run_dir} already holds a run: give another folder, or move it away first (its owner.key cannot be "
            f"made again); to train it: swarm-peer seed {run_dir}"
        )


def check_sources(options: RunOptions) -> None:
    """Raise UserError if the model or the data is a path to nothing."""
    check_exists("--model", options.model)
    if options.data_kind != "hub":
        check_exists("--data", options.data)


def print_run(console: Console, manifest: RunManifest, run_dir: Path, link_mbps: float = 200.0) -> None:
    """What was made: run id, stages, bytes of a round and of a token. link_mbps: of the lines that are told of."""
    from rich.table import Table

    from peers.commands.averaging import averaging_note, averaging_warnings
    from peers.commands.corrector import corrector_notes
    from peers.commands.inspect import boundary_bytes, stage_rows

    console.print(f"run {manifest.name!r}, id {manifest.run_id}, in {run_dir}", markup=False)
    table = Table("stage", "layers", "parameters", "compute", "file", title=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in stage_rows(manifest):
        table.add_row(
            str(row.stage),
            f"{row.first_layer}-{row.last_layer}",
            f"{row.parameters / 1e6:,.1f} M",
            f"{row.compute_share:.0%}",
            f"{row.file_bytes / 1e6:,.0f} MB",
        )
    console.print(table)
    data = manifest.data
    epochs = manifest.total_steps * manifest.samples_per_step / data.train_samples
    console.print(
        f"data: {data.train_samples:,} rows of {data.sequence_length} tokens to train on, "
        f"{data.heldout_samples:,} held out; {manifest.total_steps} steps take {epochs:.2f} epochs",
        markup=False,
    )
    for note in corrector_notes(manifest):
        console.print(note, markup=False)
    for note in (averaging_note(manifest, link_mbps), *averaging_warnings(manifest)):
        console.print(note, markup=False)
    cost = boundary_bytes(manifest, run_dir / "artifacts")
    if cost is not None:
        console.print(
            f"bytes per token and boundary: forward {cost.forward:.1f} (coded {cost.coded:.1f}, "
            f"dense positions {cost.dense_positions:.1f}, ids {cost.ids:.1f}), backward {cost.backward:.1f}; "
            f"uncoded bf16 would be {cost.uncoded} each way",
            markup=False,
        )


def codec_advice(options: InitOptions, manifest: RunManifest, calibration_s: float | None) -> str | None:
    """Which codec suits the crowd's lines; None for one stage, or if a stage's compute is not known."""
    from peers.commands.advice import advise, note, stage_seconds_per_token

    given, stages = options.stage_us_per_token, manifest.model.stages
    if given is not None:
        per_token = given * 1e-6
    elif calibration_s:
        tokens = options.calibration_microbatches * manifest.tokens_per_microbatch
        per_token = stage_seconds_per_token(calibration_s, tokens, stages)
    else:
        return None
    if stages < 2:
        return None
    codec = manifest.codec
    ratio = getattr(codec, "mask_ratio", None)
    chosen = f"--codec {codec.name}" + ("" if ratio is None else f" --mask-ratio {ratio:g}")
    advice = advise(manifest.model.hidden_size, options.link_mbps, per_token)
    return note(advice, options.link_mbps, per_token, chosen, is_measured=given is None)


def run(options: InitOptions) -> int:
    """Create the run and say what was made."""
    import time

    from rich.console import Console

    from peers.commands.existing import explain_run, grant
    from peers.commands.explain import explain
    from peers.commands.progress import phases

    console = Console(highlight=False, soft_wrap=True)
    run_dir = options.run_dir.expanduser()
    if options.grant_anchor or options.revoke_anchor:
        return grant(options, run_dir)
    if options.link_mbps <= 0 or (options.stage_us_per_token is not None and options.stage_us_per_token <= 0):
        raise UserError("--link-mbps and --stage-us-per-token must be positive")
    if options.explain and (run_dir / "manifest.yaml").exists():
        return explain_run(options, run_dir, console)
    check_target(run_dir)
    check_sources(options)
    started = time.monotonic()
    seconds: dict[str, float] = {}
    with phases(console, seconds) as progress:
        manifest = create_run(options, run_dir, progress)
    print_run(console, manifest, run_dir, options.link_mbps)
    if (advice := codec_advice(options, manifest, seconds.get("calibrate codec"))) is not None:
        console.print(advice, markup=False)
    if options.explain:
        explain(console, manifest, run_dir / "artifacts", options.link_mbps, options.stage_us_per_token)
    console.print(f"next: swarm-peer seed {run_dir}", markup=False)
    console.print(f"made in {time.monotonic() - started:.0f} s")
    return 0
