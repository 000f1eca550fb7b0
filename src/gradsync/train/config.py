"""The options of a training run: one frozen dataclass, its presets, and what makes two runs the same.

Every field is an option of ``gradsync train`` of the same name (dashes for underscores) and a key of
its configuration files. Knows no parser, no torch and no files; the parser is built from the fields'
metadata in ``gradsync.cli.options``.
"""

import difflib
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from gradsync.errors import ConfigError
from gradsync.parallel.degrees import PipelineSchedule, Strategy

MAX_SEED = 2**63 - 1
"""The largest that torch's generators take."""

PresetName = Literal["tiny", "small", "gpt2", "medium", "large", "xl"]


def _option(
    default: Any,
    help_text: str,
    group: str,
    *,
    fixed: bool = False,
    per_start: bool = False,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare an option.

    A resumed run takes over all of a run's options but the ``per_start`` ones, and must not change the
    ``fixed`` ones: they decide the result.
    """
    metadata = {"help": help_text, "group": group, "fixed": fixed, "per_start": per_start}
    return field(default=default, metadata={**metadata, "at_least": at_least, "at_most": at_most, "above": above})


@dataclass(frozen=True)
class TrainConfig:
    """All options of one training run, resolved. The defaults are those of the preset ``tiny``."""

    run: str | None = _option(None, "run folder; a new one below runs/ if not given", "run", per_start=True)
    preset: PresetName = _option(
        "tiny", "model and recipe that give the defaults of the other options", "run", fixed=True
    )
    steps: int = _option(1000, "optimizer steps of the whole run", "run", fixed=True, at_least=1)
    seed: int = _option(
        1337, "seed of weights, dropout and the order of the data", "run", fixed=True, at_least=0, at_most=MAX_SEED
    )
    resume: bool = _option(False, "continue the run folder from its newest intact checkpoint", "run", per_start=True)
    stop_after: int | None = _option(
        None,
        "end after this many steps of this start as an interruption would: saved, resumable",
        "run",
        per_start=True,
        at_least=1,
    )
    debug: bool = _option(False, "show tracebacks of errors that have a plain explanation, too", "run", per_start=True)

    data: str = _option("stdlib", "text file, folder of text files, prepared shards, or 'stdlib'", "data")
    tokenizer: str | None = _option(
        None,
        "bytes, gpt2, or a tokenizers JSON file (by default bytes, or the shards' own)",
        "data",
        fixed=True,
    )
    val_fraction: float = _option(
        0.05,
        "share of the text held back for validation (shards bring their own)",
        "data",
        fixed=True,
        above=0,
        at_most=0.5,
    )
    shuffle: Literal["windows", "none"] = _option("windows", "order in which the data is read", "data", fixed=True)

    context: int = _option(128, "tokens of one sequence", "model", fixed=True, at_least=1)
    init_from: str | None = _option(
        None, "start from the weights of another run, or of a Hugging Face folder", "model", fixed=True
    )
    layers: int | None = _option(None, "number of blocks (by default the preset's)", "model", fixed=True, at_least=1)
    heads: int | None = _option(
        None, "attention heads of a block (by default the preset's)", "model", fixed=True, at_least=1
    )
    width: int | None = _option(
        None, "size of the embedding (by default the preset's)", "model", fixed=True, at_least=1
    )
    activation_checkpointing: bool = _option(
        False, "compute activations again in backward instead of keeping them: less memory, more time", "model"
    )
    dropout: float = _option(0.0, "dropout rate", "model", fixed=True, at_least=0, at_most=0.99)

    batch_tokens: int = _option(2048, "tokens of one optimizer step, over all ranks", "batch", fixed=True, at_least=1)
    micro_batch: int | None = _option(
        None,
        "sequences a rank takes at once (by default the most up to the preset's limit that divides)",
        "batch",
        at_least=1,
    )
    max_micro_batch: int = _option(
        16, "limit for the automatic choice of --micro-batch; CPUs have a lower one", "batch", at_least=1
    )

    strategy: Strategy = _option(
        "ddp",
        "how replicas share their work: ddp (each holds all), zero (the optimizer is divided), fsdp (all is divided)",
        "parallelism",
    )
    dp: int | None = _option(
        None, "replicas (by default what --tp and --pp leave)", "parallelism", per_start=True, at_least=1
    )
    tp: int = _option(1, "ranks that share the matrices of a replica (tensor parallel)", "parallelism", at_least=1)
    sequence_parallel: bool = _option(
        False, "have the ranks of --tp divide the tokens between the matrices as well: less memory", "parallelism"
    )
    pp: int = _option(1, "stages that the blocks of a replica are divided into (pipeline)", "parallelism", at_least=1)
    schedule: PipelineSchedule = _option(
        "1f1b", "order of the micro-batches in a pipeline; interleaved makes two stages a rank", "parallelism"
    )

    lr: float = _option(2e-3, "highest learning rate", "optimizer", fixed=True, above=0)
    min_lr_fraction: float = _option(
        0.1, "share of --lr that is left at the end", "optimizer", fixed=True, at_least=0, at_most=1
    )
    warmup_steps: int = _option(100, "steps in which the learning rate rises", "optimizer", fixed=True, at_least=0)
    weight_decay: float = _option(0.1, "decay of the matrices (vectors have none)", "optimizer", fixed=True, at_least=0)
    beta1: float = _option(0.9, "AdamW's first beta", "optimizer", fixed=True, at_least=0, at_most=1)
    beta2: float = _option(0.99, "AdamW's second beta", "optimizer", fixed=True, at_least=0, at_most=1)
    eps: float = _option(1e-8, "AdamW's epsilon", "optimizer", fixed=True, above=0)
    clip: float = _option(
        1.0,
        "largest global gradient norm; 0 leaves gradients as they are",
        "optimizer",
        fixed=True,
        at_least=0,
    )
    non_finite: Literal["stop", "skip"] = _option(
        "stop",
        "what all ranks do with a step whose loss or gradient is not finite on any rank",
        "optimizer",
        fixed=True,
    )

    eval_every: int = _option(200, "steps between validations; 0 validates at the end only", "evaluation", at_least=0)
    eval_tokens: int = _option(
        65_536, "tokens of one validation; 0 takes all held-back text", "evaluation", fixed=True, at_least=0
    )
    sample_every: int = _option(0, "steps between samples; 0 samples at the end only", "evaluation", at_least=0)
    sample_prompt: str = _option("\n", "text that samples go on from", "evaluation")
    sample_tokens: int = _option(256, "tokens of one sample; 0 for none", "evaluation", at_least=0)

    sample_temperature: float = _option(
        0.8, "0 takes the likeliest token, 1 draws as the model says", "evaluation", at_least=0
    )
    sample_top_k: int | None = _option(50, "draw among this many tokens only", "evaluation", at_least=1)

    checkpoint_every: int = _option(
        200, "steps between checkpoints; 0 saves at the end only", "checkpoints", at_least=0
    )
    keep_checkpoints: int = _option(3, "newest checkpoints kept, beside the best one", "checkpoints", at_least=1)

    async_checkpoints: bool = _option(True, "write checkpoints beside the training", "checkpoints", per_start=True)

    dtype: Literal["auto", "float32", "bfloat16"] = _option(
        "auto", "of matrix products; auto is bfloat16 on GPUs that have it, else float32", "hardware", fixed=True
    )
    compile: bool = _option(False, "compile the training step, block by block", "hardware", per_start=True)
    nproc: int | None = _option(
        None,
        "processes on this machine (by default one a core or GPU); under a launcher those that it has started",
        "hardware",
        per_start=True,
        at_least=1,
    )
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "where the ranks compute", "hardware", per_start=True)
    backend: str = _option("auto", "process group backend: auto, shm, gloo, nccl, mpi", "hardware", per_start=True)
    soft_limit: float = _option(
        60.0,
        "seconds that a rank waits for the others, in any layout, before all stop and say where each one is; 0 for no "
        "limit",
        "hardware",
        per_start=True,
        at_least=0,
    )
    threads: int | None = _option(
        None,
        "CPU threads of a rank (by default its share of the cores)",
        "hardware",
        per_start=True,
        at_least=1,
    )

    progress: Literal["auto", "live", "plain", "none"] = _option(
        "auto", "how progress is shown", "output", per_start=True
    )
    log_every: int = _option(10, "steps between lines of plain progress", "output", per_start=True, at_least=1)
    wandb: str | None = _option(None, "project in Weights & Biases to log to", "output")
    hellaswag: str | None = _option(
        None, "JSON-lines file of completion tasks; their accuracy is taken with each validation", "evaluation"
    )
    trace: bool = _option(
        False,
        "trace a few steps of all ranks: trace.json for Perfetto, and the report's timeline",
        "output",
        per_start=True,
    )
    trace_steps: int = _option(10, "how many steps --trace records", "output", per_start=True, at_least=1)
    straggler_every: int = _option(
        50,
        "steps between looks at which rank the others wait for (with fsdp, --tp and --pp: by its data and its "
        "optimizer's step alone); 0 for none",
        "output",
        per_start=True,
        at_least=0,
    )
    check_replicas_every: int = _option(
        100, "steps between comparisons of all ranks' parameters; 0 for none", "hardware", per_start=True, at_least=0
    )
    tensorboard: bool = _option(True, "write TensorBoard events where tensorboard is installed", "output")

    def __post_init__(self) -> None:
        for spec in fields(self):
            if getattr(self, spec.name) is None and "None" not in str(spec.type):
                raise ConfigError(f"{flag(spec.name)} is null; it must have a value")
            _check_range(spec.name, getattr(self, spec.name), spec.metadata)
        if self.stop_after is not None and self.stop_after > self.steps:
            raise ConfigError(
                f"--stop-after {self.stop_after} is more than --steps {self.steps}; it would never stop there"
            )


def _check_range(name: str, value: Any, limits: Any) -> None:
    if value is None or isinstance(value, str):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{flag(name)} is {value}; it must be a finite number")
    low, high, above = limits["at_least"], limits["at_most"], limits["above"]
    if low is not None and value < low:
        raise ConfigError(f"{flag(name)} is {value}; it must be at least {low}")
    if above is not None and value <= above:
        raise ConfigError(f"{flag(name)} is {value}; it must be more than {above}")
    if high is not None and value > high:
        raise ConfigError(f"{flag(name)} is {value}; it must be at most {high}")


# The recipe that the GPT-2 reproductions agree on: half a million tokens a step, 10 billion in all.
_GPT2_RECIPE: dict[str, Any] = {
    "steps": 19_073,
    "context": 1024,
    "batch_tokens": 524_288,
    "max_micro_batch": 16,
    "lr": 6e-4,
    "warmup_steps": 715,
    "beta2": 0.95,
    "eval_every": 250,
    "eval_tokens": 10_485_760,
    "sample_every": 250,
    "checkpoint_every": 1000,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {
        "steps": 5000,
        "context": 256,
        "batch_tokens": 16_384,
        "lr": 1e-3,
        "dropout": 0.2,
        "eval_every": 250,
        "eval_tokens": 262_144,
        "sample_every": 1000,
        "checkpoint_every": 500,
    },
    "gpt2": _GPT2_RECIPE,
    # Learning rates of the larger models are those of the GPT-3 paper for the same sizes.
    "medium": {**_GPT2_RECIPE, "lr": 3e-4, "max_micro_batch": 8},
    "large": {**_GPT2_RECIPE, "lr": 2.5e-4, "max_micro_batch": 4},
    "xl": {**_GPT2_RECIPE, "lr": 2e-4, "max_micro_batch": 2},
}


def flag(name: str) -> str:
    """Return the command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def resolve(given: dict[str, Any]) -> TrainConfig:
    """Return the configuration of the given values over the defaults of their preset.

    Raises:
        ConfigError: a name is unknown (the nearest one is named), or a value cannot work.
    """
    known = {spec.name: spec for spec in fields(TrainConfig)}
    for name in given:
        if name not in known:
            raise ConfigError(unknown_name(name, list(known)))
    preset = given.get("preset", known["preset"].default)
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is unknown; there are {', '.join(PRESETS)}")
    return TrainConfig(**{**PRESETS[preset], **given})


def unknown_name(name: str, known: list[str]) -> str:
    """Return the message for an option that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    hint = f"; did you mean {flag(near[0])}?" if near else ""
    return f"unknown option {flag(name)}{hint}"


def differences(config: TrainConfig, earlier: dict[str, Any]) -> list[str]:
    """Return the options that decide the result and differ from those of an earlier start."""
    now = asdict(config)
    fixed = [spec.name for spec in fields(TrainConfig) if spec.metadata["fixed"]]
    return [
        f"{flag(name)} {earlier[name]} -> {now[name]}"
        for name in fixed
        if name in earlier and earlier[name] != now[name]
    ]


def inherited(earlier: dict[str, Any]) -> dict[str, Any]:
    """Return what a resumed start takes over from the run's saved options."""
    kept = {spec.name for spec in fields(TrainConfig) if not spec.metadata["per_start"]}
    return {name: value for name, value in earlier.items() if name in kept}
