"""Configs and checkpoints of the MLP speculator, in every form they are published in."""

import inspect
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from hf_specdec import registry
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel

registry.register()

V, D_TARGET, D, N = 32, 12, 8, 3
AUTO_CLASSES: list[Any] = [AutoModel, AutoModelForCausalLM, MLPSpeculatorPreTrainedModel]


def config_json(**fields: Any) -> dict[str, Any]:
    """A config with the keys IBM writes."""
    published = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": D_TARGET,
        "inner_dim": D,
        "model_type": "mlp_speculator",
        "n_candidates": 5,
        "n_predict": N,
        "top_k_tokens_per_head": [5, 3, 2],
        "torch_dtype": "float16",
        "transformers_version": "4.38.2",
        "vocab_size": V,
    }
    return {**published, **fields}


def make_weights(tied: bool, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """All 5n names; tied names hold one tensor, as in IBM's files."""
    weights: dict[str, Tensor] = {}
    for i in range(N):
        first = 0 if tied else i
        weights[f"emb.{i}.weight"] = weights.get(f"emb.{first}.weight", torch.randn(V, D))
        weights[f"head.{i}.weight"] = weights.get(f"head.{first}.weight", torch.randn(V, D))
        weights[f"ln.{i}.weight"] = weights.get(f"ln.{first}.weight", torch.randn(D))
        weights[f"ln.{i}.bias"] = weights.get(f"ln.{first}.bias", torch.randn(D))
        shared = weights.get("proj.1.weight") if tied and i > 1 else None
        columns = D if i else D_TARGET
        weights[f"proj.{i}.weight"] = torch.randn(D, columns) if shared is None else shared
    cast = {id(tensor): tensor.to(dtype) for tensor in weights.values()}
    return {name: cast[id(tensor)] for name, tensor in weights.items()}


def prefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"speculator.{name}": tensor for name, tensor in weights.items()}


def deduplicated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first name of every tensor."""
    seen: set[int] = set()
    kept = {}
    for name in sorted(weights):
        if id(weights[name]) not in seen:
            seen.add(id(weights[name]))
            kept[name] = weights[name]
    return kept


def write_shards(folder: Path, weights: dict[str, Tensor]) -> None:
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for file, part in zip(files, (names[: N * 3], names[N * 3 :]), strict=True):
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(folder: Path, form: str, weights: dict[str, Tensor], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(**config)))
    if form == "shards":
        write_shards(folder, weights)
    elif form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path, **kwargs: Any) -> MLPSpeculatorPreTrainedModel:
    return MLPSpeculatorPreTrainedModel.from_pretrained(folder, **kwargs)


def assert_holds(model: MLPSpeculatorPreTrainedModel, weights: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert set(state) == set(prefixed(weights))
    for name, tensor in prefixed(weights).items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


def storages(model: torch.nn.Module) -> set[int]:
    return {tensor.data_ptr() for tensor in model.state_dict().values()}


class TestPublishedForms:
    """One small folder for every form on the hub."""

    @pytest.mark.parametrize("auto_class", AUTO_CLASSES)
    @pytest.mark.parametrize("form", ["one file", "shards", "bin"])
    @pytest.mark.parametrize("prefix", [True, False])
    def test_untied(self, tmp_path: Path, form: str, prefix: bool, auto_class: Any) -> None:
        weights = make_weights(tied=False)
        write(tmp_path, form, prefixed(weights) if prefix else weights)
        model = auto_class.from_pretrained(tmp_path)
        assert type(model) is MLPSpeculatorPreTrainedModel
        assert not model.training
        assert_holds(model, weights)
        assert len(storages(model)) == 5 * N

    @pytest.mark.parametrize("auto_class", AUTO_CLASSES)
    @pytest.mark.parametrize("form", ["one file", "bin", "bin with copies"])
    @pytest.mark.parametrize("prefix", [True, False])
    def test_tied(self, tmp_path: Path, form: str, prefix: bool, auto_class: Any) -> None:
        weights = make_weights(tied=True)
        stored = prefixed(weights) if prefix else weights
        if form == "one file":
            stored = deduplicated(stored)
            assert len(stored) == 6
        elif form == "bin with copies":
            stored, form = {name: tensor.clone() for name, tensor in stored.items()}, "bin"
        write(tmp_path, form, stored, tie_weights=True, scale_input=True)
        model = auto_class.from_pretrained(tmp_path)
        assert_holds(model, weights)
        assert len(storages(model)) == 6
        assert len(list(model.parameters())) == 6
        assert model.config.scale_input

    def test_tied_with_another_name_kept(self, tmp_path: Path) -> None:
        weights = make_weights(tied=True)
        kept = {"emb.2.weight", "head.1.weight", "ln.0.weight", "ln.2.bias"}
        kept |= {"proj.0.weight", "proj.2.weight"}
        write(tmp_path, "one file", {name: weights[name] for name in kept}, tie_weights=True)
        model = load(tmp_path)
        assert_holds(model, weights)
        assert len(storages(model)) == 6

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("form", ["one file", "bin"])
    def test_dtype_auto_keeps_the_dtype(self, tmp_path, form: str, dtype: torch.dtype) -> None:
        weights = make_weights(tied=False, dtype=dtype)
        write(tmp_path, form, prefixed(weights), torch_dtype=str(dtype).removeprefix("torch."))
        assert_holds(load(tmp_path, dtype="auto"), weights)
        assert load(tmp_path, dtype=torch.float64).dtype == torch.float64

    def test_tie_word_embeddings_has_no_say(self, tmp_path: Path) -> None:
        weights = make_weights(tied=False)
        write(tmp_path, "one file", prefixed(weights), tie_word_embeddings=True)
        assert_holds(load(tmp_path), weights)

    def test_tied_memory_stays_one_after_a_move_and_in_training(self, tmp_path: Path) -> None:
        stored = deduplicated(prefixed(make_weights(tied=True)))
        model = load(write(tmp_path, "one file", stored, tie_weights=True)).float().double()
        assert len(storages(model)) == 6
        hidden_states, input_ids = torch.randn(1, 4, D_TARGET), torch.randint(V, (1, 7))
        model(hidden_states, input_ids, labels=input_ids).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        first, *others = model.speculator.emb
        assert all(torch.equal(first.weight, other.weight) for other in others)

    def test_a_model_built_from_a_config_is_tied_at_once(self) -> None:
        model = MLPSpeculatorPreTrainedModel(MLPSpeculatorConfig(**config_json(tie_weights=True)))
        assert len(storages(model)) == 6
        assert not any(tensor.is_meta for tensor in model.state_dict().values())

    def test_loading_info_is_still_given(self, tmp_path: Path) -> None:
        write(tmp_path, "one file", prefixed(make_weights(tied=False)))
        for auto_class in AUTO_CLASSES:
            model, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
            assert isinstance(model, MLPSpeculatorPreTrainedModel)
            assert not info["missing_keys"] and not info["unexpected_keys"]

    def test_device_map_loads_too(self, tmp_path: Path) -> None:
        weights = make_weights(tied=True)
        stored = deduplicated(prefixed(weights))
        write(tmp_path, "one file", stored, tie_weights=True)
        assert_holds(load(tmp_path, device_map="cpu"), weights)

    def test_bin_runs_no_code(self, tmp_path: Path) -> None:
        marker = tmp_path / "ran"

        class Payload:
            def __reduce__(self):
                return Path.touch, (marker,)

        write(tmp_path, "one file", {})
        (tmp_path / "model.safetensors").unlink()
        torch.save({"speculator.emb.0.weight": Payload()}, tmp_path / "pytorch_model.bin")
        for kwargs in ({}, {"weights_only": False}):
            with pytest.raises(ValueError, match="no pickle of tensors alone.*run code from it"):
                load(tmp_path, **kwargs)
            assert not marker.exists()


class TestRefusedLoads:
    """Nothing of a loaded network is random."""

    @pytest.mark.parametrize("auto_class", AUTO_CLASSES)
    @pytest.mark.parametrize("form", ["one file", "bin"])
    def test_missing_weight(self, tmp_path: Path, form: str, auto_class: Any) -> None:
        weights = prefixed(make_weights(tied=False))
        del weights["speculator.head.1.weight"]
        write(tmp_path, form, weights)
        with pytest.raises(ValueError, match=r"missing .*: speculator\.head\.1\.weight\n"):
            auto_class.from_pretrained(tmp_path)

    def test_missing_weight_of_a_tied_network(self, tmp_path: Path) -> None:
        weights = deduplicated(prefixed(make_weights(tied=True)))
        del weights["speculator.proj.1.weight"]
        write(tmp_path, "one file", weights, tie_weights=True)
        with pytest.raises(ValueError, match=r"missing .*speculator\.proj\.1\.weight"):
            load(tmp_path)

    def test_tied_file_under_an_untied_config(self, tmp_path: Path) -> None:
        write(tmp_path, "one file", deduplicated(prefixed(make_weights(tied=True))))
        with pytest.raises(ValueError, match=r"missing .*emb\.1\.weight.*\n.*tie_weights=False"):
            load(tmp_path)

    def test_untied_file_under_a_tied_config(self, tmp_path: Path) -> None:
        write(tmp_path, "one file", prefixed(make_weights(tied=False)), tie_weights=True)
        message = r"tied by the config .*speculator\.emb\.1\.weight and speculator\.emb\.0\.weight"
        with pytest.raises(ValueError, match=message):
            load(tmp_path)

    def test_wrong_shape(self, tmp_path: Path) -> None:
        weights = prefixed(make_weights(tied=False))
        weights["speculator.proj.0.weight"] = torch.zeros(D, D_TARGET + 1)
        write(tmp_path, "one file", weights)
        message = (
            r"wrong shape: speculator\.proj\.0\.weight \(checkpoint \[8, 13\], network \[8, 12"
        )
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
        assert load(tmp_path, ignore_mismatched_sizes=True).config.emb_dim == D_TARGET

    @pytest.mark.parametrize("prefix", ["speculator.", ""])
    def test_more_heads_than_the_config_says(self, tmp_path: Path, prefix: str) -> None:
        weights = {f"{prefix}{name}": tensor for name, tensor in make_weights(False).items()}
        write(tmp_path, "one file", weights, n_predict=2, top_k_tokens_per_head=[4, 3])
        message = r"not in the network: .*emb\.2\.weight.*\n.*n_predict=2"
        with pytest.raises(ValueError, match=message):
            load(tmp_path)

    def test_no_weight_of_the_network_at_all(self, tmp_path: Path) -> None:
        write(tmp_path, "one file", {"model.embed_tokens.weight": torch.zeros(V, D)})
        with pytest.raises(ValueError, match=r"speculator\.emb\.0\.weight.* and 3 more"):
            load(tmp_path)

    def test_weights_of_something_else_beside_it_are_left_alone(self, tmp_path: Path) -> None:
        weights = make_weights(tied=False)
        write(tmp_path, "one file", {**prefixed(weights), "optimizer.step": torch.zeros(1)})
        assert_holds(load(tmp_path), weights)

    def test_draft_ids_that_are_no_ids_of_the_target(self, tmp_path: Path) -> None:
        MLPSpeculatorPreTrainedModel(
            MLPSpeculatorConfig(**config_json(draft_vocab_size=4))
        ).save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["speculator.draft_token_ids"] = torch.tensor([1, 2, 3, V])
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match="1 to 32"):
            load(tmp_path)
        del weights["speculator.draft_token_ids"]
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"missing .*draft_token_ids"):
            load(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_weights": True},
        {"share_target_weights": True},
        {"share_target_weights": True, "tie_weights": True},
        {"draft_vocab_size": 4},
        {"draft_vocab_size": 4, "share_target_weights": True, "tie_weights": True},
        {"scale_input": True, "inner_dim": 0, "tie_weights": True},
        {"n_predict": 2, "top_k_tokens_per_head": None, "tie_weights": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_again(tmp_path: Path, fields: dict, dtype: torch.dtype) -> None:
    config = MLPSpeculatorConfig(**config_json(**fields))
    model = MLPSpeculatorPreTrainedModel(config).eval()
    torch.nn.Module.to(model, dtype)
    table = torch.randn(V, D_TARGET, dtype=dtype)
    if config.draft_vocab_size:
        model.set_draft_token_ids(torch.tensor([9, 31, 0, 7]))
    if config.share_target_weights:
        model.bind_target(table, table)
    model.save_pretrained(tmp_path)

    # Every tensor is on disk once.
    stored = load_file(tmp_path / "model.safetensors")
    distinct = sum(tensor.nbytes for tensor in model.parameters())
    distinct += config.draft_vocab_size * 8
    assert sum(tensor.nbytes for tensor in stored.values()) == distinct
    assert all(name.startswith("speculator.") for name in stored)

    again = AutoModel.from_pretrained(tmp_path)
    assert again.dtype == dtype
    assert len(storages(again)) == len(storages(model))
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    if config.share_target_weights:
        again.bind_target(table, table)
    arguments = torch.randn(2, D_TARGET, dtype=dtype), torch.randint(V, (2,))
    assert torch.equal(again.propose(*arguments), model.propose(*arguments))


class TestConfig:
    """What the configs of the wild look like, and what is refused."""

    def test_a_config_in_ibms_format_stays_in_it(self, tmp_path: Path) -> None:
        MLPSpeculatorConfig(**config_json()).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        expected = set(config_json()) - {"torch_dtype"} | {"dtype", "tie_weights", "scale_input"}
        assert set(written) == expected
        extended = {"share_target_weights": True, "draft_vocab_size": 4, "eos_token_id": 2}
        MLPSpeculatorConfig(**config_json(**extended)).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert set(written) == expected | set(extended)

    def test_arctic_training_config(self, tmp_path: Path) -> None:
        fields = config_json(
            architectures="MLPSpeculatorPreTrainedModel", top_k_tokesns_per_head=[1, 1, 1]
        )
        del fields["top_k_tokens_per_head"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
        config = AutoConfig.from_pretrained(tmp_path)
        assert type(config) is MLPSpeculatorConfig
        assert config.architectures == ["MLPSpeculatorPreTrainedModel"]
        assert config.top_k_tokens_per_head == [1, 1, 1]
        assert "top_k_tokesns_per_head" not in config.to_dict()

    @pytest.mark.parametrize(
        ("n_predict", "top_k"),
        [(1, [5]), (3, [5, 4, 3]), (4, [4, 3, 2, 2]), (7, [4, 3, 2, 2, 2, 2, 2])],
    )
    def test_missing_top_k_follows_the_heads(self, n_predict: int, top_k: list[int]) -> None:
        assert MLPSpeculatorConfig(n_predict=n_predict).top_k_tokens_per_head == top_k

    def test_defaults_are_not_shared(self) -> None:
        MLPSpeculatorConfig().top_k_tokens_per_head.append(7)
        assert MLPSpeculatorConfig().top_k_tokens_per_head == [5, 4, 3]

    def test_unknown_keys_are_kept(self) -> None:
        config = MLPSpeculatorConfig(**config_json(max_seq_len=4096))
        assert config.max_seq_len == 4096
        assert config.to_dict()["max_seq_len"] == 4096

    def test_names_other_code_reads(self) -> None:
        config = MLPSpeculatorConfig(**config_json())
        assert config.hidden_size == D_TARGET
        assert MLPSpeculatorConfig(hidden_size=7).emb_dim == 7
        assert config.get_text_config().vocab_size == V
        assert config.bos_token_id is config.eos_token_id is config.pad_token_id is None
        assert config.dtype == torch.float16
        with pytest.raises(AttributeError):
            _ = config.num_attention_heads

    def test_any_attention_implementation_of_the_target_is_fine(self, tmp_path: Path) -> None:
        write(tmp_path, "one file", prefixed(make_weights(tied=False)))
        for implementation in ("sdpa", "eager"):
            load(tmp_path, attn_implementation=implementation)

    @pytest.mark.parametrize(
        "fields",
        [
            {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]},
            {"architectures": "ArcticLSTMSpeculatorPreTrainedModel"},
            {"inner_dim": [8, 8]},
        ],
        ids=str,
    )
    def test_lstm_variant_is_refused_by_name(self, fields: dict) -> None:
        with pytest.raises(ValueError, match="ArcticLSTMSpeculatorPreTrainedModel"):
            MLPSpeculatorConfig(**config_json(**fields))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"n_predict": 0}, "n_predict must be .* at least 1, got 0"),
            ({"n_predict": 1.5}, "n_predict must be an integer"),
            ({"n_predict": True}, "n_predict must be an integer"),
            ({"vocab_size": -1}, "vocab_size"),
            ({"emb_dim": 0}, "emb_dim"),
            ({"inner_dim": -8}, "inner_dim"),
            ({"n_candidates": 0}, "n_candidates"),
            ({"tie_weights": "yes"}, "tie_weights must be true or false"),
            ({"tie_weights": True, "n_predict": 1, "top_k_tokens_per_head": [5]}, "at least 2"),
            ({"draft_vocab_size": V + 1}, "draft_vocab_size=33 is larger than vocab_size=32"),
            ({"draft_vocab_size": -1}, "draft_vocab_size"),
            ({"top_k_tokens_per_head": [5, 4]}, r"n_predict=3, got 2 entries \[5, 4\]"),
            ({"top_k_tokens_per_head": [5, 4, 0]}, r"top_k_tokens_per_head\[2\]"),
            ({"top_k_tokens_per_head": 5}, "must be a list of 3"),
        ],
        ids=str,
    )
    def test_values_out_of_range_are_named(self, fields: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MLPSpeculatorConfig(**config_json(**fields))


def test_a_config_that_is_given_is_used_unless_it_is_another_models(tmp_path: Path) -> None:
    given = MLPSpeculatorConfig(**config_json())
    MLPSpeculatorPreTrainedModel(given).save_pretrained(tmp_path)
    load = MLPSpeculatorPreTrainedModel.from_pretrained

    # A drafter's own remote code brings a class of the same name.
    file = inspect.getfile(MLPSpeculatorConfig)
    spec = spec_from_file_location("remote_configuration", file)
    assert spec is not None and spec.loader is not None
    remote = module_from_spec(spec)
    spec.loader.exec_module(remote)
    assert remote.MLPSpeculatorConfig is not MLPSpeculatorConfig
    for config in (given, remote.MLPSpeculatorConfig(**config_json()), str(tmp_path)):
        assert load(tmp_path, config=config).config.n_predict == N
    with pytest.raises(ValueError, match="config is a LlamaConfig .*give an MLPSpeculatorConfig"):
        load(tmp_path, config=LlamaConfig())


def test_registration_can_be_repeated() -> None:
    registry.register()
    registry.register()
    family = registry.FAMILIES["mlp_speculator"]
    assert family.model_class is MLPSpeculatorPreTrainedModel
    assert (
        family.drafter_class(family.model_class(MLPSpeculatorConfig(**config_json()))) is not None
    )
