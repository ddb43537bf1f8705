"""RunConfig: everything a run is, from one JSON file and `--set` overrides.

Types are strict, unknown keys are errors, and all problems are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from configs.reading import ConfigError, apply_override, explain, read_json
from model.config import ModelConfig
from model.loss import LossMethod


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Corpus(Section):
    path: str = Field(min_length=1)
    """Prefix of PATH.bin and PATH.idx."""
    weight: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Share of the samples, and so of the tokens, relative to the other corpora's weights; left
    out, 1. 0 leaves the corpus out."""
    tokens: int | None = Field(None, gt=0)
    """Instead of a weight, how many tokens of it are for training. All corpora have this or none,
    and the sum has to cover what the run reads."""
    max_epochs: float = Field(4.0, gt=0, allow_inf_nan=False)
    """A run that reads the corpus more often is warned of it. Repeated tokens are worth about as
    much as new ones up to 4 epochs, and less and less beyond (https://arxiv.org/abs/2305.16264)."""

    @property
    def share(self) -> float:
        """In any unit."""
        if self.tokens is not None:
            return self.tokens
        return 1.0 if self.weight is None else self.weight


class Stage(Section):
    """A later part of a run with its own weights. Every corpus goes on where it stands."""

    from_tokens: int = Field(gt=0)
    """Tokens of the run before it, rounded up to whole samples."""
    weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """Of the corpora in data.train, in their order."""


class DataConfig(Section):
    train: list[Corpus] = Field(min_length=1)
    validation: str | dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], str]
    """Prefix of the held-out corpus, or of several by name: each is then logged as
    validation_loss/NAME, and validation_loss is their mean, in which every set counts the same."""
    schedule: list[Stage] = []
    """Later stages of the blend, in order."""
    tokenizer: str | None = None
    """Of corpora without a manifest.json: a file or folder as data.prepare takes it."""
    document_masking: bool = False
    """Tokens attend within their document only, and positions restart in each."""

    @property
    def validation_sets(self) -> dict[str, str]:
        """Prefixes by name; a single corpus has the name ""."""
        return self.validation if isinstance(self.validation, dict) else {"": self.validation}

    @property
    def tokenizer_path(self) -> str:
        """The one named, or the copy that data.prepare puts beside its token files."""
        return self.tokenizer or str(Path(self.train[0].path).parent)

    @model_validator(mode="after")
    def _check_blend(self) -> DataConfig:
        paths = [corpus.path for corpus in self.train]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"train: {twice[0]} is listed twice; give it one entry, with the sum")
        budgets = [corpus.tokens is not None for corpus in self.train]
        weighted = [corpus.weight is not None for corpus in self.train]
        if any(budgets) and (any(weighted) or not all(budgets)):
            raise ValueError("train: either every corpus has tokens, a budget, or none has")
        if not any(corpus.share for corpus in self.train):
            raise ValueError("train: all weights are 0, nothing would be read")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> DataConfig:
        before = 0
        for number, stage in enumerate(self.schedule):
            where = f"schedule.{number}"
            if len(stage.weights) != len(self.train):
                raise ValueError(
                    f"{where}.weights: {len(stage.weights)} weights for the {len(self.train)} "
                    "corpora of data.train"
                )
            if not any(stage.weights):
                raise ValueError(f"{where}.weights: all are 0, nothing would be read")
            if stage.from_tokens <= before:
                raise ValueError(f"{where}.from_tokens: {stage.from_tokens} is not after {before}")
            before = stage.from_tokens
        if self.schedule and self.train[0].tokens is not None:
            raise ValueError("schedule: goes with weights; the budgets of data.train are for a run")
        return self

    @model_validator(mode="after")
    def _check_validation(self) -> DataConfig:
        if not self.validation or not all(self.validation_sets.values()):
            raise ValueError("validation: names no corpus")
        return self


class TrainingConfig(Section):
    """What DeepSpeed's own configuration does not hold. Intervals are in optimizer steps."""

    max_steps: int = Field(gt=0)
    sequence_length: int = Field(gt=0)
    """Tokens per sample."""
    seed: int = Field(1234, ge=0)
    """Weights, sample order and dropout follow from it."""
    run_folder: str = Field(min_length=1)
    log_interval: int = Field(10, gt=0)
    evaluation_interval: int = Field(100, gt=0)
    evaluation_samples: int = Field(128, gt=0)
    """Validation samples, over all ranks; fewer when the corpus holds fewer."""
    save_interval: int = Field(500, gt=0)
    keep_last: int | None = Field(None, gt=0)
    """Complete checkpoints that are kept; left out: all."""
    keep_every: int | None = Field(None, gt=0)
    """Beside them, those at multiples of this many steps are kept for good."""
    save_in_background: bool = True
    """Copy the states to main memory and write them while training goes on."""
    on_failed_save: Literal["continue", "stop"] = "continue"
    """Whether the run goes on without a checkpoint that cannot be written. The last one must be."""
    loss: LossMethod = "auto"
    """Whether the logits are formed in full or chunk by chunk; "auto" goes by their size."""
    z_loss: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the squared log-partition function, added to the training loss."""
    compile_blocks: bool = False
    """Compile each block with torch.compile, which needs a C++ compiler on a CPU."""
    expandable_segments: bool = False
    """Let torch's CUDA allocator grow its segments, against fragmentation."""
    rehearse: bool | None = None
    """Whether a step that changes nothing comes first, to see that it fits. Left out: on a GPU, and
    where its outcome is acted on."""
    on_out_of_memory: Literal["stop", "adapt"] = "stop"
    """What a rehearsal that does not fit leads to: "adapt" recomputes more, then halves the
    micro-batch and doubles the accumulation, until it fits."""
    decay_embeddings: bool = True
    """Whether weight decay applies to embeddings (a tied output head is one)."""
    time_limit: str | None = None
    """Of the process, as in "23:50:00" (hours, minutes, seconds): a checkpoint is saved in time.
    Left out, the end of the SLURM job, where SLURM tells it."""
    max_bad_steps: int = Field(20, gt=0)
    """Skipped steps in a row after which the run stops. fp16's first loss scale takes up to 16."""
    spike_deviations: float | None = Field(None, gt=0, allow_inf_nan=False)
    """A loss this many standard deviations above the mean of the last 64 is a spike; left out,
    none is."""
    on_spike: Literal["skip", "rollback"] = "skip"
    """"skip" leaves its update out; "rollback" continues from the last checkpoint, and with the
    samples that follow the spike."""
    skip_samples: list[list[int]] = Field([])
    """[first, last] numbers of training samples, both included, that are never trained on."""
    hang_seconds: float | None = Field(1800.0, gt=0, allow_inf_nan=False)
    """A step that takes this long, and ten times as long as usual, ends the run; null: none does.
    The first steps, evaluations and saves may take six times as long."""
    replica_check_interval: int | None = Field(None, gt=0)
    """Steps between comparisons of the weights of data-parallel ranks, to the bit; not at ZeRO 3,
    where each weight exists once."""

    @field_validator("time_limit")
    @classmethod
    def _check_time_limit(cls, value: str | None) -> str | None:
        if value is not None and not seconds_of(value):
            raise ValueError(f'expected hours:minutes:seconds, as in "23:50:00"; got {value!r}')
        return value

    @field_validator("skip_samples")
    @classmethod
    def _check_ranges(cls, value: list[list[int]]) -> list[list[int]]:
        for entry in value:
            if len(entry) != 2 or not 0 <= entry[0] <= entry[1]:
                raise ValueError(f"expected [[first, last], ...] sample numbers; got {entry}")
        return value

    @model_validator(mode="after")
    def _check_retention(self) -> TrainingConfig:
        if self.keep_every is not None:
            if self.keep_last is None:
                raise ValueError("keep_every: without keep_last all checkpoints are kept")
            if self.keep_every % self.save_interval:
                raise ValueError(
                    f"keep_every={self.keep_every} is no multiple of "
                    f"save_interval={self.save_interval}"
                )
        return self

    @model_validator(mode="after")
    def _check_spikes(self) -> TrainingConfig:
        if self.on_spike == "rollback" and self.spike_deviations is None:
            raise ValueError("on_spike: acts only where spike_deviations says what a spike is")
        return self


def seconds_of(time_limit: str) -> int | None:
    """Of "hours:minutes:seconds", as SLURM and clocks write it; None for anything else or zero."""
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", time_limit)
    if parts is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


Blocks = str | list[int]


class ActivationCheckpointing(Section):
    """What each block keeps for backward; see memory/policies.py for policies and block names."""

    backend: Literal["torch", "deepspeed"] = "torch"
    """"deepspeed" applies the deepspeed section's own activation_checkpointing block."""
    reentrant: bool = False
    """The deepspeed backend's older implementation, DeepSpeed's own default."""
    policies: Literal["auto"] | dict[Literal["none", "selective", "full", "offload"], Blocks] = (
        Field({})
    )
    """"auto": those of least step time that fit the memory budget (memory/fit.py)."""
    memory_budget: str | None = None
    """For "auto": bytes of one rank's device, as in "70GiB", at most what it has; left out, all."""

    @model_validator(mode="after")
    def _check_backend(self) -> ActivationCheckpointing:
        if self.memory_budget is not None and self.policies != "auto":
            raise ValueError('memory_budget: read only where policies is "auto"')
        if self.backend == "deepspeed" and isinstance(self.policies, dict):
            others = self.policies.keys() - {"none", "full"}
            if others:
                raise ValueError(f'backend "deepspeed" has no policy {sorted(others)[0]!r}')
        if self.backend == "torch" and self.reentrant:
            raise ValueError('reentrant: only the backend "deepspeed" has a reentrant form')
        return self


class RunConfig(Section):
    """One run. `deepspeed` is DeepSpeed's own configuration, as in its documentation."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    deepspeed: dict[str, Any]

    @model_validator(mode="after")
    def _check_compilation(self) -> RunConfig:
        if self.training.compile_blocks and "selective" in self.activation_checkpointing.policies:
            raise ValueError(
                "training.compile_blocks: a compiled block shows no matrix products to "
                'activation_checkpointing.policies.selective; use "full" or do not compile'
            )
        return self

    @model_validator(mode="after")
    def _check_rehearsal(self) -> RunConfig:
        zero = self.deepspeed.get("zero_optimization")
        offloads = [v for k, v in zero.items() if "offload" in k] if isinstance(zero, dict) else []
        on_nvme = any(isinstance(o, dict) and o.get("device") == "nvme" for o in offloads)
        adapts = self.training.on_out_of_memory == "adapt"
        if on_nvme and (self.training.rehearse or adapts):
            raise ValueError(
                "training.rehearse: a step with offload to NVMe writes to it and cannot be undone"
            )
        if adapts and self.training.rehearse is False:
            raise ValueError('training.on_out_of_memory: "adapt" needs training.rehearse')
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> RunConfig:
        zero = self.deepspeed.get("zero_optimization")
        if (
            self.training.replica_check_interval
            and isinstance(zero, dict)
            and zero.get("stage") == 3
        ):
            raise ValueError(
                "training.replica_check_interval: at ZeRO stage 3 each weight exists once, there "
                "is nothing to compare; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_sequence_length(self) -> RunConfig:
        if self.training.sequence_length > self.model.max_sequence_length:
            raise ValueError(
                f"training.sequence_length={self.training.sequence_length} is longer than "
                f"model.max_sequence_length={self.model.max_sequence_length}"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's JSON file, apply `a.b=value` overrides, and check the whole.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds mistakes (all of them listed).
    """
    raw = read_json(path)
    for override in overrides:
        apply_override(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from None


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The run with other values at some dotted keys, as in {"training.seed": 1}; None removes one.

    Raises:
        ConfigError: the run with the changes is not a valid one.
    """
    raw = config.model_dump()
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = raw
        for name in parents:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from None
