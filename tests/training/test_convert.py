"""Checkpoints to and from transformers' folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

from configs.schema import RunConfig, load_config
from model.generate import generate
from model.gpt import GPT, build
from training import convert, model_card, store
from training.weights import start_from

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


THEIR_SIZES = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=67)
THEIRS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (
        GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=67),
        {"preset": "gpt2"},
    ),
    "neox": (
        GPTNeoXConfig(**THEIR_SIZES, intermediate_size=128, max_position_embeddings=16),
        {"preset": "neox"},
    ),
    "llama": (
        LlamaConfig(
            **THEIR_SIZES, num_key_value_heads=2, intermediate_size=40, max_position_embeddings=64
        ),
        {"preset": "llama", "kv_heads": 2, "mlp_width": 40, "norm_epsilon": 1e-6},
    ),
}


def write_source(name: str, folder: Path, **options: Any) -> Any:
    """A random model as transformers saves it."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(THEIRS[name][0]).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if key.endswith(("norm.weight", "ln_1.weight")) else 0.0, 0.2)
    theirs.save_pretrained(folder, **options)
    return theirs


@pytest.fixture
def config_for(altered: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """The run's JSON file for a source of THEIRS."""

    def write(name: str, **changes: Any) -> Path:
        fields = {f"model.{key}": value for key, value in THEIRS[name][1].items()}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(altered(fields | changes)))
        return path

    return write


def import_(source: Path, config: Path) -> int:
    return convert.main(["import", "--source", str(source), "--config", str(config)])


@pytest.mark.parametrize("name", THEIRS)
def test_an_imported_model_has_the_loss_of_transformers(
    name: str, config_for: Callable[..., Path], tmp_path: Path
) -> None:
    theirs = write_source(name, tmp_path / "source")
    assert import_(tmp_path / "source", config_for(name)) == 0
    config = load_config(tmp_path / "run" / "config.json")
    assert config == load_config(tmp_path / "config.json")
    ours = build(config.model, seed=0).eval()
    start_from(ours, tmp_path / "run" / "initial")
    tokens = torch.randint(67, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[:, :16]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(expected, tokens[:, 1:].flatten())
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama-grouped-tied"])
def test_an_export_imports_back_to_the_bit(
    name: str, altered: Callable[..., Any], tmp_path: Path
) -> None:
    raw = altered({f"model.{key}": value for key, value in PRESETS[name].items()})
    before = write_run(raw)
    assert export(tmp_path / "run", tmp_path / "out") == 0
    raw["training"]["run_folder"] = str(tmp_path / "again")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert import_(tmp_path / "out", tmp_path / "config.json") == 0
    after = build(before.config, seed=1)
    start_from(after, tmp_path / "again" / "initial")
    for (key, mine), (_, other) in zip(
        before.named_parameters(), after.named_parameters(), strict=True
    ):
        rows = 67 if key in ("token_embedding.weight", "head.weight") else len(mine)
        assert torch.equal(mine[:rows], other[:rows]), key
        assert not other[rows:].any(), "padding"


def change_config(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda s: (s / "model.safetensors").unlink(), "holds no weights"),
    "no config": (lambda s: (s / "config.json").unlink(), "config.json: cannot read"),
    "cut off": (cut, "model.safetensors: damaged or cut off"),
    "other class": (lambda s: change_config(s, model_type="bert"), "model_type is 'bert'"),
    "no head": (lambda s: change_config(s, architectures=["LlamaModel"]), "is of LlamaModel"),
    "scaled": (lambda s: change_config(s, rope_parameters=LINEAR), "rope_type='linear'"),
    "other width": (lambda s: change_config(s, intermediate_size=48), "model.mlp_width"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_imported_is_named_and_leaves_nothing(
    mistake: str, config_for: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    write_source("llama", tmp_path / "source")
    make, expected = MISTAKES[mistake]
    make(tmp_path / "source")
    assert import_(tmp_path / "source", config_for("llama")) == 2
    assert expected in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"source", "config.json"}


def test_what_transformers_cannot_express_is_refused(
    altered: Callable[..., Any], tmp_path: Path, capsys: Any
) -> None:
    write_run(altered({"model.qk_norm": True}))
    assert export(tmp_path / "run", tmp_path / "out") == 2
    assert "qk_norm=True" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_logits_that_differ_leave_nothing(
    altered: Callable[..., Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(altered({}))
    monkeypatch.setattr("training.logits.TOLERANCE", 0.0)
    assert export(tmp_path / "run", tmp_path / "out") == 1
    assert "logits differ" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_card_has_the_last_losses_that_are_numbers(tmp_path: Path) -> None:
    """A log may hold losses that were no number, and end in a line that a crash cut off."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3.5}\n{"step": 2, "validation_loss": 3.25}\n'
        '{"step": 2, "loss": null}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo'
    )
    assert model_card.losses(tmp_path, 2).splitlines()[2:] == [
        "| training | 1 | 3.5000 |",
        "| validation | 2 | 3.2500 |",
    ]
