"""What a GPT is: its sizes, its architecture switches, and the parameter count they imply."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# A preset fixes the switches of a published architecture; any of them can still be overridden.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "norm": "layernorm",
        "position": "learned",
        "mlp": "gelu_tanh",
        "parallel_residual": False,
        "biases": True,
        "tied_embeddings": True,
    },
    "neox": {
        "norm": "layernorm",
        "position": "rope",
        "rotary_fraction": 0.25,
        "mlp": "gelu",
        "parallel_residual": True,
        "biases": True,
        "tied_embeddings": False,
    },
    "llama": {
        "norm": "rmsnorm",
        "position": "rope",
        "rotary_fraction": 1.0,
        "mlp": "swiglu",
        "parallel_residual": False,
        "biases": False,
        "tied_embeddings": False,
    },
}


class ModelConfig(BaseModel):
    """Sizes and switches of one GPT. Sizes are always explicit; a preset never hides one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: Literal["gpt2", "neox", "llama"] = "gpt2"

    layers: int = Field(gt=0)
    width: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(0, ge=0)
    """Key and value heads of grouped-query attention; left out or 0, as many as `heads`."""
    mlp_width: int = Field(0, ge=0)
    """Hidden width of the MLP; left out or 0, 4 x width (for swiglu 8/3 x width, to 64 below)."""
    vocabulary_size: int = Field(gt=0)
    """Token ids the tokenizer can produce."""
    vocabulary_multiple: int = Field(1, gt=0)
    """Embedding rows are padded up to this multiple; padding rows are never predicted."""
    max_sequence_length: int = Field(gt=0)
    """Longest sequence in tokens; the size of the table when positions are learned."""

    norm: Literal["layernorm", "rmsnorm"]
    norm_epsilon: float = Field(1e-5, gt=0)
    position: Literal["learned", "rope"]
    rotary_fraction: float = Field(1.0, gt=0, le=1)
    """Share of each head's channels that rotates."""
    rotary_base: float = Field(10_000.0, gt=1)
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "relu_squared"]
    parallel_residual: bool
    """True: x + attention(norm1(x)) + mlp(norm2(x)). False: one after the other."""
    biases: bool
    """Biases on every linear layer and on layernorm; the output head never has one."""
    qk_norm: bool = False
    """Normalise queries and keys per head, before rotation."""
    tied_embeddings: bool
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability, on embeddings, attention weights and both residual branches."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of every matrix; residual projections are divided by sqrt(2 layers)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Under a misspelt preset, any will do: the name itself is the one mistake to report.
        switches = PRESETS.get(str(values.get("preset")), PRESETS["gpt2"])
        filled = {**switches, **values}
        if isinstance(filled.get("heads"), int):
            filled["kv_heads"] = filled.get("kv_heads") or filled["heads"]
        if isinstance(filled.get("width"), int):
            swiglu_width = max(64, 8 * filled["width"] // 3 // 64 * 64)
            default = swiglu_width if filled.get("mlp") == "swiglu" else 4 * filled["width"]
            filled["mlp_width"] = filled.get("mlp_width") or default
        return filled

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        problems = []
        if self.width % self.heads:
            problems.append(f"heads={self.heads} does not divide width={self.width}")
        if self.heads % self.kv_heads:
            problems.append(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if not problems and self.position == "rope" and self.rotary_width % 2:
            problems.append(
                f"rotary_fraction={self.rotary_fraction} of head width {self.head_width} is "
                f"{self.rotary_width} channels; rotation needs an even number"
            )
        if not problems and self.position == "rope" and self.rotary_width == 0:
            problems.append(f"rotary_fraction={self.rotary_fraction} leaves no channel to rotate")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def rotary_width(self) -> int:
        return int(self.rotary_fraction * self.head_width)

    @property
    def padded_vocabulary_size(self) -> int:
        """Rows of the embedding and of the output head."""
        return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def qkv_width(self) -> int:
        """Output width of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def up_width(self) -> int:
        """Output width of the MLP's first projection; swiglu holds gate and value in one."""
        return self.mlp_width * (2 if self.mlp == "swiglu" else 1)

    def matmul_parameters_per_block(self) -> int:
        """Weights of one block that take part in matrix products."""
        attention = self.width * (self.qkv_width + self.width)
        return attention + self.width * self.up_width + self.mlp_width * self.width

    def parameter_count(self) -> int:
        """Parameters in closed form, a tied matrix counted once, vocabulary padding included."""
        affine = 2 if self.norm == "layernorm" and self.biases else 1
        block = self.matmul_parameters_per_block() + 2 * affine * self.width
        if self.biases:
            block += self.qkv_width + self.width + self.up_width + self.width
        if self.qk_norm:
            block += 2 * affine * self.head_width
        embedding = self.padded_vocabulary_size * self.width
        positions = self.max_sequence_length * self.width if self.position == "learned" else 0
        head = 0 if self.tied_embeddings else embedding
        return embedding + positions + self.layers * block + affine * self.width + head
