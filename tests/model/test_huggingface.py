"""Parity with transformers: the same weights give the same logits, losses and gradients."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
)

from model.config import ModelConfig
from model.gpt import GPT, build
from model.huggingface import (
    export_state_dict,
    from_transformers_config,
    import_state_dict,
    to_transformers_config,
)

TOLERANCE = 1e-5  # largest difference over largest value
GPT2_SIZES = dict(n_layer=2, n_embd=24, n_head=3, n_positions=19, vocab_size=61)
SIZES = dict(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=72,
    max_position_embeddings=19,
    vocab_size=61,
)
ROPE = {"rope_type": "default", "rope_theta": 500.0}
THEIRS: dict[str, Any] = {
    "gpt2": GPT2Config(**GPT2_SIZES),
    "gpt2-untied-gelu-narrow": GPT2Config(
        **GPT2_SIZES, n_inner=40, activation_function="gelu", tie_word_embeddings=False
    ),
    "gpt2-relu2": GPT2Config(**GPT2_SIZES, activation_function="relu2", layer_norm_epsilon=1e-3),
    "neox-parallel": GPTNeoXConfig(**SIZES),
    "neox-sequential": GPTNeoXConfig(
        **SIZES,
        use_parallel_residual=False,
        hidden_act="gelu_fast",
        rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
    ),
    "neox-tied": GPTNeoXConfig(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "llama-gqa-tied": LlamaConfig(
        **SIZES, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=ROPE
    ),
    "llama-mqa-biases": LlamaConfig(
        **SIZES, num_key_value_heads=1, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3
    ),
}


def randomised(hf_config: Any) -> Any:
    """Their model; nothing in it is 0 or 1, so that no weight can be dropped or swapped unseen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.2)
    return model


def imported(theirs: Any, vocabulary_multiple: int = 8) -> GPT:
    fields = from_transformers_config(theirs.config).model_dump()
    config = ModelConfig(**fields | {"vocabulary_multiple": vocabulary_multiple})
    model = GPT(config).eval()
    model.load_state_dict(import_state_dict(config, theirs.state_dict()))
    return model


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.fixture(params=THEIRS)
def theirs(request: pytest.FixtureRequest) -> Any:
    return randomised(THEIRS[request.param])


def test_logits_loss_and_every_gradient_equal_theirs(theirs: Any) -> None:
    ours = imported(theirs)
    tokens = torch.randint(61, (3, 19), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens, labels=tokens)  # they shift the labels themselves
    logits = ours(tokens)
    assert relative_difference(logits[..., :61], expected.logits) < TOLERANCE
    assert (logits[..., 61:] == -torch.inf).all()

    loss = ours(tokens[:, :-1], tokens[:, 1:])
    assert float(loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=TOLERANCE)

    expected.loss.backward()
    loss.backward()
    gradients = GPT(ours.config)  # a model of gradients: exporting it names and lays them out
    gradients.load_state_dict(
        {name: p.grad for name, p in ours.named_parameters(remove_duplicate=False)}
    )
    exported = export_state_dict(gradients)
    expected_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert exported.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert relative_difference(exported[name], gradient) < TOLERANCE, name


def test_weights_survive_both_round_trips_bit_for_bit(theirs: Any) -> None:
    ours = imported(theirs)
    exported = export_state_dict(ours)
    expected = theirs.state_dict()
    if ours.config.tied_embeddings:
        del expected["lm_head.weight"]
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())

    again = import_state_dict(ours.config, exported)
    assert again.keys() == ours.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.state_dict().items())


def test_imported_padding_rows_are_zero(theirs: Any) -> None:
    ours = imported(theirs, vocabulary_multiple=64)
    for matrix in (ours.token_embedding.weight, ours.head.weight):
        assert matrix.shape[0] == 64
        assert (matrix[61:] == 0).all()
        assert (matrix[:61] != 0).all()


def test_a_tied_matrix_stays_one_parameter() -> None:
    ours = imported(randomised(THEIRS["gpt2"]))
    assert ours.head.weight is ours.token_embedding.weight


@pytest.mark.parametrize("name", THEIRS)
def test_their_configuration_survives_the_round_trip(name: str) -> None:
    ours = from_transformers_config(THEIRS[name])
    again = to_transformers_config(ours)
    assert type(again) is type(THEIRS[name])
    assert from_transformers_config(again) == ours


@pytest.mark.parametrize(
    "fields",
    [
        {"preset": "gpt2", "dropout": 0.1, "mlp": "relu_squared", "init_std": 0.01},
        {"preset": "neox", "parallel_residual": False, "tied_embeddings": True},
        {"preset": "neox", "rotary_fraction": 1.0, "rotary_base": 5e5, "norm_epsilon": 1e-6},
        {"preset": "llama", "kv_heads": 2, "biases": True, "rotary_base": 5e5, "mlp_width": 56},
    ],
)
def test_our_configuration_survives_the_round_trip(fields: dict[str, Any]) -> None:
    sizes = dict(layers=2, width=32, heads=4, vocabulary_size=61, max_sequence_length=16)
    config = ModelConfig(**sizes, **fields)
    assert from_transformers_config(to_transformers_config(config)) == config


@pytest.mark.parametrize(
    ("hf_config", "parameters"),
    [  # published: GPT-2 124M, GPT-NeoX-20B (arXiv 2204.06745), Llama 2 7B
        (GPT2Config(), 124_439_808),
        (GPTNeoXConfig(), 20_554_567_680),
        (LlamaConfig(), 6_738_415_616),
    ],
    ids=["gpt2", "neox-20b", "llama-7b"],
)
def test_published_models_have_their_published_size(hf_config: Any, parameters: int) -> None:
    assert from_transformers_config(hf_config).parameter_count() == parameters


@pytest.mark.parametrize("name", ["gpt2", "neox-parallel", "llama-gqa-tied"])
def test_exported_files_load_in_transformers(name: str, tmp_path: Path) -> None:
    config = from_transformers_config(THEIRS[name])
    ours = build(config, seed=3).eval()
    hf_config = to_transformers_config(config)
    hf_config.save_pretrained(tmp_path)
    save_file(export_state_dict(ours), tmp_path / "model.safetensors", {"format": "pt"})
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(19)[None]
    assert relative_difference(ours(tokens), theirs(tokens).logits) < TOLERANCE


def test_exporting_warns_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """transformers' default special tokens lie beyond a small vocabulary."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_config(
            to_transformers_config(from_transformers_config(THEIRS["gpt2"]))
        )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"preset": "llama", "mlp": "relu_squared", "kv_heads": 2}, ["mlp='relu_squared'"]),
        ({"preset": "gpt2", "qk_norm": True}, ["GPT2LMHeadModel", "qk_norm=True"]),
        ({"preset": "neox", "mlp": "swiglu"}, ["GPTNeoXForCausalLM", "mlp='swiglu'"]),
        ({"preset": "gpt2", "kv_heads": 2}, ["kv_heads=2"]),
        ({"preset": "neox", "biases": False}, ["biases=False"]),
        ({"preset": "gpt2", "parallel_residual": True}, ["parallel_residual=True"]),
        ({"preset": "llama", "rotary_fraction": 0.5}, ["LlamaForCausalLM", "rotary_fraction=0.5"]),
        ({"preset": "neox", "biases": False, "qk_norm": True}, ["biases=False", "qk_norm=True"]),
    ],
)
def test_switches_without_a_counterpart_are_refused(
    fields: dict[str, Any], named: list[str]
) -> None:
    sizes = dict(layers=1, width=32, heads=4, vocabulary_size=61, max_sequence_length=16)
    config = ModelConfig(**sizes, **fields)
    with pytest.raises(ValueError, match="no transformers class") as refusal:
        to_transformers_config(config)
    assert all(name in str(refusal.value) for name in named)
    with pytest.raises(ValueError, match="no transformers class"):
        export_state_dict(build(config, seed=0))


@pytest.mark.parametrize(
    ("hf_config", "named"),
    [
        (BertConfig(), "bert"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (GPT2Config(scale_attn_weights=False), "scale_attn_weights"),
        (GPT2Config(resid_pdrop=0.2), "resid_pdrop"),
        (GPT2Config(activation_function="tanh"), "activation_function='tanh'"),
        (GPTNeoXConfig(attention_bias=False), "biases=False"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SIZES, head_dim=8), "head_dim=8"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "mlp='gelu'"),
        (
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type='linear'",
        ),
    ],
)
def test_their_features_without_a_counterpart_are_refused(hf_config: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        from_transformers_config(hf_config)


def test_weights_that_do_not_fit_are_refused() -> None:
    theirs = randomised(THEIRS["neox-parallel"])
    config = from_transformers_config(theirs.config)
    weights = theirs.state_dict()
    with pytest.raises(ValueError, match=r"lack .*layers\.1\.mlp\.dense_h_to_4h\.bias"):
        import_state_dict(
            config, {k: v for k, v in weights.items() if "layers.1.mlp.dense_h_to_4h.b" not in k}
        )
    with pytest.raises(ValueError, match=r"does not have: \['surplus'\]"):
        import_state_dict(config, weights | {"surplus": torch.zeros(1)})
    smaller = ModelConfig(**config.model_dump() | {"vocabulary_size": 60})
    with pytest.raises(ValueError, match=r"embed_in.*\[61, 64\], not \[60, 64\]"):
        import_state_dict(smaller, weights)


def test_transformers_is_not_imported_before_it_is_needed() -> None:
    check = "import sys, model.huggingface; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=Path(__file__).parents[2])
