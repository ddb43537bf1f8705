"""Checkpoints to and from transformers' folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import RunConfig
from model.generate import generate
from model.gpt import GPT, build
from training import convert, store

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"preset": "gpt2"},
    "gpt2-untied-relu2": {"preset": "gpt2", "tied_embeddings": False, "mlp": "relu_squared"},
    "gpt2-narrow-gelu": {"preset": "gpt2", "mlp": "gelu", "mlp_width": 40, "norm_epsilon": 1e-3},
    "neox": {"preset": "neox", "rotary_fraction": 0.5},
    "neox-sequential-tied": {
        "preset": "neox", "rotary_fraction": 1.0, "parallel_residual": False,
        "tied_embeddings": True,
    },
    "llama": {"preset": "llama"},
    "llama-grouped-tied": {"preset": "llama", "kv_heads": 2, "tied_embeddings": True},
    "llama-biases": {"preset": "llama", "kv_heads": 1, "biases": True, "rotary_base": 500.0},
}  # fmt: skip


def randomised(model: GPT) -> GPT:
    """Nothing in it is 0 or 1, so that no weight can be dropped or swapped unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_run(raw: dict[str, Any], step: int = 7) -> GPT:
    """A run folder with one checkpoint of a random model, as one rank without ZeRO leaves it."""
    config = RunConfig.model_validate(raw)
    model = randomised(build(config.model, seed=0))
    folder = Path(config.training.run_folder)
    checkpoint = folder / "checkpoints" / store.name_of(step)
    checkpoint.mkdir(parents=True)
    path = checkpoint / "mp_rank_00_model_states.pt"
    torch.save({"module": model.state_dict()}, path)
    (folder / "config.json").write_text(config.model_dump_json())
    written = store.Written(bytes=path.stat().st_size, sha256=store.checksum(path))
    manifest = store.Manifest(
        progress={"step": step, "samples_consumed": 8 * step},
        zero_stage=0,
        tensor_parallel=1,
        precision="float32",
        versions={"torch": torch.__version__},
        config=store.as_json(config.model_dump()),
        deepspeed={},
        files={path.name: written},
    )
    store.write_manifest(checkpoint, manifest)
    return model


def export(run: str | Path, output: Path, *more: str) -> int:
    given = [] if "--tokenizer" in more else ["--tokenizer", "none"]
    arguments = ["export", "--checkpoint", str(run), "--output", str(output), *given, *more]
    return convert.main(arguments)


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_computes_the_same_and_writes_the_same_text(
    name: str, altered: Callable[..., Any], tmp_path: Path
) -> None:
    ours = write_run(altered({f"model.{key}": value for key, value in PRESETS[name].items()}))
    assert export(tmp_path / "run", tmp_path / "out") == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.vocab_size == ours.config.vocabulary_size, "without padding"
    tokens = torch.randint(67, (3, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[..., :67], atol=1e-4, rtol=0)
    prompt = tokens[:1, :4]
    expected = generate(ours, prompt, max_new_tokens=12, temperature=0)
    found = theirs.generate(prompt, max_new_tokens=12, do_sample=False)
    assert found.tolist() == expected.tolist()
