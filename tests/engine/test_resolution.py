"""Which drafter a SpeculativeConfig means, and what is said where it means none."""

import copy
import json
import warnings

import pytest
from tiny_models import EOS, HIDDEN_SIZE, PAD, VOCAB_SIZE, ScriptedDrafter
from transformers import AutoConfig, AutoModel, LlamaConfig, PreTrainedConfig

import hf_specdec
from hf_specdec.integration import ATTACHED
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoMTP


def tiny_mimo(layers: int = 1) -> MiMoForCausalLM:
    """A random MiMo with MTP layers."""
    config = MiMoConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
        eos_token_id=EOS, pad_token_id=PAD, num_nextn_predict_layers=layers,
    )  # fmt: skip
    model = MiMoForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def own(target):
    """A Llama of the test's own."""
    return copy.deepcopy(target)


@pytest.fixture
def mimo():
    return tiny_mimo()


@pytest.fixture
def folder(make_speculator, tmp_path):
    """A saved speculator."""
    make_speculator().save_pretrained(tmp_path / "speculator")
    return str(tmp_path / "speculator")


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights fails the test."""
    monkeypatch.setattr(
        AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded")
    )


def drafted(model, prompts, **kwargs) -> int:
    """Tokens a step of the attached model drafts."""
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(**prompts(1), **{**options, **kwargs})
    return len(output.speculation.accepted_per_position)


def refused(model, config, match) -> None:
    """Attaching raises, and what was attached before is still there, untouched."""
    before = model.__dict__.get(ATTACHED)
    with pytest.raises(ValueError, match=match):
        hf_specdec.attach(model, config)
    assert model.__dict__.get(ATTACHED) is before


class TestDetection:
    def test_the_family_of_a_loaded_model(self, own, make_speculator, prompts):
        hf_specdec.attach(own, {"model": make_speculator()})
        assert own.__dict__[ATTACHED].config.method == "mlp_speculator"
        assert drafted(own, prompts) == 4

    def test_the_family_of_a_folder_whatever_its_name(self, own, make_speculator, tmp_path):
        folder = tmp_path / "eagle3-mimo_mtp"
        make_speculator().save_pretrained(folder)
        for config in ({"model": folder}, {"model": str(folder), "method": "mlp_speculator"}):
            hf_specdec.attach(own, config)
            assert own.__dict__[ATTACHED].config.method == "mlp_speculator"

    def test_no_model_means_the_targets_own_layers(self, mimo, prompts):
        hf_specdec.attach(mimo, {})
        assert mimo.__dict__[ATTACHED].config.method == "mtp"
        assert drafted(mimo, prompts) == 1

    def test_an_old_name_of_mtp(self, mimo, prompts):
        with pytest.warns(FutureWarning, match="mimo_mtp"):
            hf_specdec.attach(mimo, {"method": "mimo_mtp"})
        assert drafted(mimo, prompts) == 1

    def test_no_model_and_no_layers(self, own):
        refused(own, {}, "has no model.*LlamaForCausalLM.*no MTP layers")
        refused(own, {"method": "mlp_speculator"}, "method='mlp_speculator'.*has no model")

    def test_the_target_named_as_model(self, mimo, tmp_path, monkeypatch):
        mimo.save_pretrained(tmp_path / "mimo")
        mimo = MiMoForCausalLM.from_pretrained(tmp_path / "mimo")
        monkeypatch.chdir(tmp_path)
        for model in (mimo, MiMoMTP(mimo), str(tmp_path / "mimo"), "mimo", "./mimo/"):
            for method in ({}, {"method": "mtp"}):
                hf_specdec.detach(mimo)
                hf_specdec.attach(mimo, {"model": model, **method})
                assert mimo.__dict__[ATTACHED].config.method == "mtp"
        mimo.name_or_path = "some/mimo"
        hf_specdec.attach(mimo, {"model": "some/mimo"})
        refused(mimo, {"model": "some/mimo", "revision": "v2"}, "revision='v2'.*is the target")

    def test_a_target_without_layers_named_as_model(self, own):
        refused(own, {"model": own}, "names the target itself as model.*no MTP layers")

    def test_own_drafters_have_no_method(self, own):
        drafter = ScriptedDrafter([[3]])
        hf_specdec.attach(own, {"model": drafter})
        assert own.__dict__[ATTACHED].config.method is None
        for method in ("mtp", "mlp_speculator"):
            refused(
                own,
                {"model": drafter, "method": method},
                f"method='{method}'.*<ScriptedDrafter>.*its own kind.*Leave method out",
            )


class TestContradictions:
    def test_mtp_and_a_speculator(self, mimo, make_speculator, folder, no_weights):
        for model, shown in ((make_speculator(), "<MLPSpeculatorPreTrainedModel>"), (folder, "'")):
            refused(
                mimo,
                {"method": "mtp", "model": model},
                rf"method='mtp' drafts.*but model={shown}.*of method='mlp_speculator'",
            )

    def test_mlp_speculator_and_mtp_layers(self, mimo, tmp_path, no_weights):
        mimo.save_pretrained(tmp_path)
        method = {"method": "mlp_speculator"}
        refused(mimo, {**method, "model": mimo}, "method='mlp_speculator' contradicts.*target")
        refused(mimo, {**method, "model": MiMoMTP(mimo)}, "'mlp_speculator' contradicts.*'mtp'")
        other = copy.deepcopy(mimo)
        for model in (other, str(tmp_path)):
            for config in (method, {}, {"method": "mtp"}):
                refused(mimo, {**config, "model": model}, "model_type='mimo' and not the target")

    def test_models_that_are_no_drafters(self, own, tmp_path, no_weights):
        LlamaConfig().save_pretrained(tmp_path / "llama")
        (tmp_path / "medusa").mkdir()
        (tmp_path / "medusa" / "config.json").write_text('{"model_type": "medusa"}')
        for name in ("llama", "medusa"):
            model = str(tmp_path / name)
            kind = rf"model_type='{name}', which hf_specdec has no drafter for.*assistant_model"
            refused(own, {"model": model}, kind)
            refused(
                own, {"model": model, "method": "mlp_speculator"}, rf"contradicts model.*{kind}"
            )
            refused(own, {"model": model, "method": "mtp"}, f"own layers.*'{name}' and not the")
        refused(own, {"model": copy.deepcopy(own)}, "LlamaForCausalLM with model_type='llama'")
        refused(own, {"model": 7}, "model=<int> is a int, which")

    def test_a_speculator_of_another_target(self, own, make_speculator, tmp_path, no_weights):
        make_speculator(emb_dim=48).save_pretrained(tmp_path)
        refused(own, {"model": str(tmp_path)}, "emb_dim=48.*hidden_size=32")

    def test_models_that_are_not_there(self, own, tmp_path, no_weights):
        refused(own, {"model": "no/such"}, "model='no/such' can't be read; it must be")
        config = {"model": "no/such", "revision": "v1"}
        refused(own, config, "model='no/such' with revision='v1' can't be read")
        (tmp_path / "config.json").write_text("{")
        refused(own, {"model": str(tmp_path)}, "can't be read")
        (tmp_path / "config.json").unlink()
        refused(own, {"model": str(tmp_path)}, "something without a model_type in a config.json")

    def test_a_refusal_leaves_the_last_attachment(self, own, make_speculator, prompts):
        hf_specdec.attach(own, {"model": make_speculator(), "num_speculative_tokens": 2})
        refused(own, {"method": "mtp"}, "no MTP layers")
        assert drafted(own, prompts) == 2

    def test_a_revision_is_asked_for_in_config_and_weights(self, own, folder, monkeypatch):
        asked = []

        def redirect(loader):
            original = getattr(loader, "__func__", loader)

            def load(cls, name, *args, revision=None, **kwargs):
                asked.append((name, revision))
                return original(cls, folder, *args, **kwargs)

            return classmethod(load)

        for owner, name in (
            (AutoModel, "from_pretrained"),
            (AutoConfig, "from_pretrained"),
            (PreTrainedConfig, "get_config_dict"),
        ):
            monkeypatch.setattr(owner, name, redirect(getattr(owner, name)))
        hf_specdec.attach(own, {"model": "some/drafter", "revision": "v1"})
        ours = [call for call in asked if call[0] == "some/drafter"]
        assert ours == [("some/drafter", "v1")] * 3
        assert own.__dict__[ATTACHED].config.revision is None


class TestHowMany:
    def test_the_checkpoint_decides_where_nobody_else_does(self, own, make_speculator, prompts):
        hf_specdec.attach(own, {"model": make_speculator(n_predict=3)})
        assert drafted(own, prompts) == 3

    @pytest.mark.parametrize("k", [0, 1, 4])
    def test_up_to_the_heads_of_a_speculator(self, own, make_speculator, prompts, k):
        hf_specdec.attach(own, {"model": make_speculator(), "num_speculative_tokens": k})
        assert drafted(own, prompts) == k

    def test_more_than_the_heads_of_a_speculator(self, own, make_speculator, folder, no_weights):
        # Twice n_predict would pass vLLM's check and draft with heads that nobody has trained.
        match = "num_speculative_tokens=8 must be an integer from 0 to 4"
        refused(own, {"model": make_speculator(), "num_speculative_tokens": 8}, match)
        refused(own, {"model": folder, "num_speculative_tokens": 8}, match)

    def test_an_n_predict_that_isnt_the_checkpoints(self, own, folder):
        file = f"{folder}/config.json"
        with open(file) as stream:
            config = json.load(stream)
        for n, match in ((0, "n_predict must be an integer"), (5, r"speculator\.head\.4")):
            config.update(n_predict=n, top_k_tokens_per_head=[2] * n)
            with open(file, "w") as stream:
                json.dump(config, stream)
            refused(own, {"model": folder}, match)

    def test_multiples_of_the_mtp_layers(self, prompts):
        target = tiny_mimo(layers=2)
        for k in (1, 2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                hf_specdec.attach(target, {"num_speculative_tokens": k})
            assert drafted(target, prompts) == k
        refused(target, {"num_speculative_tokens": 3}, "=3 must be a multiple of 2")
        with pytest.warns(UserWarning, match="num_speculative_tokens=4.*n_predict=2.*run again"):
            hf_specdec.attach(target, {"num_speculative_tokens": 4})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert drafted(target, prompts) == 4
        assert not [w for w in said if "run again" in str(w.message)]


class TestTensorParallelSize:
    @pytest.mark.parametrize("size", [None, 1])
    def test_one_always_works(self, own, make_speculator, prompts, size):
        hf_specdec.attach(own, {"model": make_speculator(), "draft_tensor_parallel_size": size})
        assert own.__dict__[ATTACHED].config.draft_tensor_parallel_size == 1
        assert drafted(own, prompts) == 4

    def test_others_are_refused(self, own, mimo, make_speculator):
        config = {"model": make_speculator(), "draft_tensor_parallel_size": 2}
        refused(own, config, "draft_tensor_parallel_size=2 must be 1: .* size is 1")
        own._tp_size = 4
        refused(own, config, "draft_tensor_parallel_size=2 must be 1 or 4: .* size is 4")
        mimo._tp_size = 4
        refused(mimo, {"draft_tensor_parallel_size": 3}, "=3 must be 1 or 4")

    def test_the_targets_size(self, own, mimo, make_speculator):
        own._tp_size = mimo._tp_size = 4
        hf_specdec.attach(own, {"model": make_speculator(), "draft_tensor_parallel_size": 4})
        for model, config, size in (
            (own, {"model": make_speculator()}, 1),
            (mimo, {}, 4),
            (mimo, {"draft_tensor_parallel_size": 1}, 1),
        ):
            hf_specdec.attach(model, config)
            assert model.__dict__[ATTACHED].config.draft_tensor_parallel_size == size


class TestForOneCall:
    """``generate(speculative_config=...)``: the drafter is the call's assistant_model."""

    def test_what_fits(self, own, mimo, make_speculator, prompts, folder):
        speculator = AutoModel.from_pretrained(folder)
        for model, assistant, config in (
            (own, speculator, {"method": "mlp_speculator", "model": folder}),
            (own, speculator, {"model": speculator}),
            (mimo, MiMoMTP(mimo), {"method": "mtp", "model": mimo}),
            (mimo, MiMoMTP(mimo), '{"method": "mtp"}'),
        ):
            config = {"assistant_model": assistant, "speculative_config": config}
            assert drafted(model, prompts, **config) >= 1

    @pytest.mark.parametrize(
        ("config", "match"),
        [
            ({"method": "mtp"}, "the assistant_model is of method='mlp_speculator'"),
            ({"model": "some/drafter"}, "names model='some/drafter', but this call drafts with"),
            ({"draft_tensor_parallel_size": 2}, "=2 must be 1"),
        ],
    )
    def test_what_doesnt(self, own, make_speculator, prompts, config, match):
        with pytest.raises(ValueError, match=match):
            drafted(own, prompts, assistant_model=make_speculator(), speculative_config=config)
        hf_specdec.attach(own, {"model": make_speculator()})
        with pytest.raises(ValueError, match=match):
            drafted(own, prompts, speculative_config=config)
        assert drafted(own, prompts) == 4

    def test_a_config_replaces_the_attached_one(self, own, make_speculator, prompts):
        hf_specdec.attach(own, {"model": make_speculator(), "num_speculative_tokens": 3})
        assert drafted(own, prompts, speculative_config={"num_speculative_tokens": 2}) == 2
        assert drafted(own, prompts) == 3
