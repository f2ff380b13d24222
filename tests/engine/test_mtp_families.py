"""Every family of MTP layers: read from its published layout, the same tokens, the right drafts."""

import copy
import functools
import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import torch
from mtp_checkpoints import FAMILIES, HIDDEN, LAYERS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import PAD, VOCAB_SIZE, new_tokens, row_by_row
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_layers import MtpModel

import hf_specdec
from hf_specdec.drafters import MTPDrafter, mtp
from hf_specdec.modeling.mtp import FAMILIES as ROWS
from hf_specdec.modeling.mtp import MTPModel, checkpoint_mtp, load_mtp
from hf_specdec.registry import mtp_network

NEW = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
TRANSFORMERS_HAS = ["deepseek_v3", "deepseek_v3-two_modules", "glm4_moe"]


@functools.cache
def target_of(name: str) -> Any:
    return mtp_checkpoints.load(name)


def batch(rows: int) -> dict[str, torch.Tensor]:
    """Left-padded random prompts."""
    generator = torch.Generator().manual_seed(3)
    lengths = [9, 4, 13][:rows]
    width = max(lengths)
    ids = torch.full((rows, width), PAD)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
    slots = torch.arange(width)
    mask = (slots >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", FAMILIES)
class TestEveryFamily:
    def test_every_weight_of_the_checkpoint_is_read(self, name, caplog):
        target = target_of(name)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_specdec"):
            network = load_mtp(target)
        assert caplog.records == []
        assert network.n_predict == FAMILIES[name].modules
        assert not any(t.is_meta for t in (*network.parameters(), *network.buffers()))
        stored = load_file(mtp_checkpoints.write(name) / "model-00002-of-00002.safetensors")
        own = ("embed_tokens.", "shared_head.head.")
        numbers = sum(t.numel() for k, t in stored.items() if not any(o in k for o in own))
        assert numbers == sum(t.numel() for t in network.state_dict().values())

    @pytest.mark.parametrize("rows", [1, 3])
    def test_the_same_tokens(self, name, rows):
        target, inputs = target_of(name), batch(rows)
        network = mtp_network(target)
        expected = row_by_row(target, inputs, **GREEDY)
        for k in {1, 3 if 3 % network.n_predict == 0 else 4}:
            output = target.generate(
                **inputs,
                **GREEDY,
                assistant_model=network,
                num_assistant_tokens=k,
                return_dict_in_generate=True,
            )
            assert new_tokens(output.sequences, inputs, [NEW] * rows) == expected
            assert output.speculation.num_draft_tokens > 0

    def test_sampled(self, name):
        target, inputs = target_of(name), batch(3)
        common = {"do_sample": True, "max_new_tokens": 8, "row_seeds": [3, 1, 4]}
        common["assistant_model"] = mtp_network(target)
        slow, fast = (
            target.generate(**inputs, **common, num_assistant_tokens=k)
            for k in (0, mtp_network(target).n_predict)
        )
        assert slow.tolist() == fast.tolist()

    def test_drafts_are_what_the_modules_say(self, name):
        network = mtp_network(target_of(name))
        check_drafts(name, num_assistant_tokens=3 * network.n_predict)


SEVERAL = [name for name, published in FAMILIES.items() if published.modules > 1]


@pytest.mark.parametrize("name", [*SEVERAL, "qwen3_next"])
class TestDraftsInSpecialCalls:
    def test_a_prompt_in_pieces(self, name, monkeypatch):
        check_drafts(name, prefill_chunk_size=5)
        monkeypatch.setattr(mtp, "_CHUNK", 4)
        check_drafts(name)

    def test_a_row_without_drafts_until_others_end(self, name):
        check_drafts(name, ends=5, num_speculative_tokens_per_batch_size=[[1, 2, 8], [3, 3, 0]])

    def test_k_below_the_modules(self, name):
        check_drafts(name, num_assistant_tokens=1)

    def test_drafting_that_stops_early(self, name):
        check_drafts(name, stops_early=True)


class Records(MTPDrafter):
    """Notes the text, the logits and the draft of every proposal, of which many are right.

    Args:
        network: drafts.
        texts: the prompts.
        answers: what the target says behind them.
        stops_early: end every other proposal after its first token.
    """

    def __init__(self, network, texts, answers, stops_early=False):
        super().__init__(network)
        self.texts, self.answers = [list(t) for t in texts], [list(a) for a in answers]
        self.lengths = [len(t) for t in texts]
        self.stops_early = stops_early
        self.records: list[tuple[list[int], list[torch.Tensor], list[int]]] = []
        self.calls = 0

    def observe(self, step):
        super().observe(step)
        if self.calls:
            for row, count in enumerate(step.host_num_accepted):
                self.texts[row] += step.input_ids[row, : count + 1].tolist()
        self.calls += 1

    def keep_rows(self, order):
        super().keep_rows(order)
        for name in ("texts", "answers", "lengths"):
            setattr(self, name, [getattr(self, name)[i] for i in order])

    def propose(self, token_ids, num_draft_tokens, pick=None):
        texts = [[*t, int(i)] for t, i in zip(self.texts, token_ids, strict=True)]
        seen: list[torch.Tensor] = []

        def choose(k, scores, _ids):
            seen.append(scores)
            choose.done = self.stops_early and self.calls % 2 == 0  # type: ignore[attr-defined]
            tokens = scores.argmax(-1)
            for row, text in enumerate(texts):
                place = len(text) - self.lengths[row] + k
                if (7 * self.calls + 3 * row + k) % 4 and place < len(self.answers[row]):
                    tokens[row] = self.answers[row][place]
            return tokens

        choose.done = False  # type: ignore[attr-defined]
        draft = super().propose(token_ids, num_draft_tokens, choose)  # type: ignore[arg-type]
        for row, text in enumerate(texts):
            self.records.append((text, [s[row] for s in seen], draft[row].tolist()))
        return draft


def check_drafts(
    name: str, stops_early: bool = False, ends: int | None = None, **kwargs: Any
) -> None:
    """Whatever was accepted before, the logits are those of a plain run over the whole text.

    Args:
        name: the family.
        stops_early: see `Records`.
        ends: let the first row end after this many tokens.
        kwargs: of ``generate``.
    """
    target, inputs = target_of(name), batch(3)
    network = mtp_network(target)
    mask = inputs["attention_mask"].bool()
    texts = [r[m].tolist() for r, m in zip(inputs["input_ids"], mask, strict=True)]
    answers = row_by_row(target, inputs, **GREEDY)
    if ends is not None:
        kwargs["eos_token_id"] = eos = answers[0][ends - 1]
        answers = [r[: r.index(eos) + 1] if eos in r else r for r in answers]
    drafter = Records(network, texts, answers, stops_early)
    output = target.generate(
        **inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True, **kwargs
    )
    assert new_tokens(output.sequences, inputs, [len(a) for a in answers]) == answers
    assert len(drafter.records) > 4 and output.speculation.num_accepted_tokens > 4
    for text, seen, draft in drafter.records:
        expected = plain_logits(target, network, text, draft)
        for found, scores in zip(seen, expected, strict=True):
            torch.testing.assert_close(found, scores, atol=2e-3, rtol=2e-3)


@torch.no_grad()
def plain_logits(
    target: Any, network: Any, text: list[int], draft: list[int]
) -> list[torch.Tensor]:
    """What the modules say behind a text that goes on as drafted: one ``[V]`` for each draft.

    There are no caches: every module runs over all entries each time. Behind the text the modules'
    own outputs take the place of the target's states.
    """
    tokens = [*text, *draft, *[0] * network.num_modules]
    states = states_of(target, torch.tensor([text[:-1]]), network.feed)
    logits: list[torch.Tensor] = []
    while len(logits) < len(draft):
        hidden, length = states, states.shape[1]
        positions = torch.arange(length)[None]
        distance = positions[0, :, None] - positions[0]
        masks = {}
        for layer_type, window in zip(network.layer_types, network.layer_windows, strict=True):
            hidden_keys = (distance < 0) | (distance >= (window or length))
            mask = torch.zeros(length, length).masked_fill(hidden_keys, torch.finfo().min)
            masks[layer_type] = mask[None, None]
        ends = []
        for module in range(network.num_modules):
            following = torch.tensor([tokens[module + 1 : module + 1 + length]])
            embeds = network.embed(following, positions)
            hidden = network(hidden, embeds, positions, masks, None, module)
            logits.append(network.logits(hidden[:, -1], module)[0])
            ends.append(hidden[:, -1])
        states = torch.cat([states, torch.stack(ends, dim=1)], dim=1)
    return logits[: len(draft)]


@torch.no_grad()
def states_of(target: Any, ids: torch.Tensor, feed: str = "post_norm") -> torch.Tensor:
    """The target's states at every token of a text without padding."""
    from hf_specdec.modeling.mtp import final_norm

    found: list[torch.Tensor] = []
    norm = final_norm(target)
    if feed == "post_norm":
        handle = norm.register_forward_hook(lambda _m, _args, output: found.append(output))
    else:
        handle = norm.register_forward_pre_hook(lambda _m, args: found.append(args[0]))
    target(input_ids=ids, attention_mask=torch.ones_like(ids))
    handle.remove()
    return found[0]


@torch.no_grad()
@pytest.mark.parametrize("name", TRANSFORMERS_HAS)
def test_first_pass_agrees_with_transformers(name):
    """All but the zeroed embedding at position 0, which transformers doesn't have."""
    target = mtp_checkpoints.load(name)
    # transformers knows the numbers of the published models' layers only.
    modules = FAMILIES[name].modules
    target._keys_to_ignore_on_load_unexpected = [rf"layers\.{LAYERS + i}\." for i in range(modules)]
    theirs, ours = MtpModel.from_pretrained(target), load_mtp(target)
    ids = batch(1)["input_ids"]
    states = states_of(target, ids)
    following = torch.cat([ids[:, 1:], torch.tensor([[7]])], dim=1)
    length = ids.shape[1]
    positions = torch.arange(length)[None]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = theirs.forward_layer(0, states, positions + 1, None, input_ids=following)
    expected = theirs._project_to_logits(expected)

    def first_pass(network):
        embeds = network.embed(following, positions)
        return network.logits(network(states, embeds, positions, {"full_attention": causal}))

    unmasked = first_pass(ours.with_switches(mask_position_0=False))
    torch.testing.assert_close(unmasked, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(first_pass(ours)[:, 0], expected[:, 0], atol=1e-2)


@torch.no_grad()
def test_step_agrees_with_transformers_but_for_what_is_known():
    """transformers feeds it the state behind the norm, and uses the target's head for all."""
    target = mtp_checkpoints.load("step3p7")
    target._keys_to_ignore_on_load_unexpected = [rf"layers\.{LAYERS + i}\." for i in range(3)]
    theirs, ours = MtpModel.from_pretrained(target), load_mtp(target)
    ids = batch(1)["input_ids"]
    states = states_of(target, ids)
    following = torch.cat([ids[:, 1:], torch.tensor([[7]])], dim=1)
    positions = torch.arange(ids.shape[1])[None]
    distance = positions[0, :, None] - positions[0]
    hidden_keys = (distance < 0) | (distance >= ours.config.sliding_window)
    mask = torch.zeros(distance.shape).masked_fill(hidden_keys, torch.finfo().min)[None, None]
    expected = theirs.forward_layer(0, states, positions + 1, None, input_ids=following)
    found = ours(states, ours.embed(following, positions), positions, {"sliding_attention": mask})
    norms: Any = ours.final_norm
    torch.testing.assert_close(norms[0](found), expected, atol=1e-4, rtol=1e-4)
    assert ours.feed == "pre_norm"
    assert not torch.allclose(ours.logits(found), theirs._project_to_logits(expected), atol=0.1)


def test_ling_is_refused_by_transformers():
    target = target_of("bailing_hybrid")
    with pytest.raises(ValueError, match="mtp_layer_types"):
        target.config.get_mtp_config()


@pytest.mark.parametrize(
    ("model_type", "rest", "name"),
    [
        ("step3p5", "layers.1.transformer.shared_head.output.weight", "heads.1.weight"),
        ("step3p5", "layers.1.transformer.shared_head.norm.weight", "final_norm.1.weight"),
        ("step3p5", "layers.0.transformer.self_attn.q_proj.weight", "blocks.0.0.self_attn.q_proj."),
        ("deepseek_v3", "layers.0.embed_tokens.weight", None),
        ("qwen3_next", "embed_tokens.weight", None),
        ("bailing_hybrid", "layers.0.shared_head.norm.weight", "final_norm.0.weight"),
    ],
)
def test_other_spellings_that_are_published(model_type, rest, name):
    found = ROWS[model_type].rename(rest)
    assert found == name or (found is not None and found.startswith(str(name)))


@torch.no_grad()
def test_modules_in_turn_agree_with_transformers():
    name = "deepseek_v3-two_modules"
    target = mtp_checkpoints.load(name)
    target._keys_to_ignore_on_load_unexpected = [r"layers\.3\.", r"layers\.4\."]
    theirs = MtpModel.from_pretrained(target)
    ours = load_mtp(target).with_switches(mask_position_0=False)
    ids = batch(1)["input_ids"]
    following = torch.cat([ids[:, 1:], torch.tensor([[7]])], dim=1)
    positions = torch.arange(1, ids.shape[1] + 1)[None]
    _, expected, _ = theirs(following, states_of(target, ids), None, positions, None)
    first = int(expected[0, 0].argmax())
    ours_logits = plain_logits(target, ours, [*ids[0].tolist(), 7], [first, 0])
    for place in range(2):
        torch.testing.assert_close(ours_logits[place], expected[0, place], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
class TestIndexedAttention:
    """Targets whose layers have an indexer with keys of its own."""

    def test_a_cache_from_turn_to_turn(self, name):
        target = target_of(name)
        caches = [DynamicCache(config=target.config), DynamicCache(config=target.config)]
        texts = [batch(3)["input_ids"][:, -4:]] * 2
        for _ in range(3):
            for i, extra in enumerate(({}, {"assistant_model": mtp_network(target)})):
                ids = torch.cat([texts[i], texts[i][:, :3]], dim=1)
                mask = torch.ones_like(ids)
                texts[i] = target.generate(
                    ids, attention_mask=mask, cache=caches[i], **GREEDY, **extra
                )
            assert texts[0].tolist() == texts[1].tolist()
        layers: Any = [cache.layers[0] for cache in caches]
        theirs, ours = layers
        torch.testing.assert_close(ours.indexer_keys, theirs.indexer_keys, atol=1e-4, rtol=1e-4)

    def test_rows_that_leave_and_buffers_that_grow(self, name, monkeypatch):
        monkeypatch.setattr("hf_specdec.targets.target._INITIAL_SLOTS", 2)
        check_drafts(name, ends=5)


class TestReadingOnce:
    def test_only_the_shards_that_hold_them_are_opened(self, monkeypatch):
        opened = []

        def record(file, *args, **kwargs):
            opened.append(Path(file).name)
            return safe_open(file, *args, **kwargs)

        monkeypatch.setattr(checkpoint_mtp, "safe_open", record)
        load_mtp(target_of("qwen3_next"))
        assert opened == ["model-00002-of-00002.safetensors"]

    def test_they_stay_with_the_target(self, monkeypatch):
        target = mtp_checkpoints.load("qwen3_next")
        first = mtp_network(target)
        monkeypatch.setattr(checkpoint_mtp, "safe_open", None)
        assert mtp_network(target) is first
        # And aren't a part of it.
        assert not any("embedding_norm" in name for name, _ in target.named_parameters())
        monkeypatch.undo()
        other = copy.deepcopy(target)
        assert mtp_network(other).target is other
        assert mtp_network(pickle.loads(pickle.dumps(target))) is not first

    def test_they_follow_the_target(self):
        target = mtp_checkpoints.load("glm4_moe")
        before: Any = mtp_network(target)
        assert before.dtype == torch.float32
        hf_specdec.attach(target, {"method": "mtp"})
        target.to(torch.bfloat16)
        inputs = batch(2)
        output = target.generate(**inputs, **GREEDY)
        assert output.shape[1] == inputs["input_ids"].shape[1] + NEW
        dtypes = {name: p.dtype for name, p in before.named_parameters()}
        # Routers stay float32, as the target's do when it is loaded.
        routers = {name for name in dtypes if name.endswith("gate.weight")}
        assert routers and {dtypes.pop(name) for name in routers} == {torch.float32}
        assert set(dtypes.values()) == {torch.bfloat16}

    def test_a_target_in_half_precision(self):
        target = mtp_checkpoints.load("glm4_moe")
        half = AutoModelForCausalLM.from_pretrained(target.name_or_path, dtype=torch.bfloat16)
        network, exact = load_mtp(half), load_mtp(target)
        assert network.dtype == torch.bfloat16
        gate, exact_gate = (
            next(p for name, p in n.named_parameters() if name.endswith("gate.weight"))
            for n in (network, exact)
        )
        assert torch.equal(gate, exact_gate)

    @pytest.mark.parametrize("format", ["one safetensors file", "one .bin", ".bin with an index"])
    def test_other_formats(self, format, tmp_path):
        source = mtp_checkpoints.write("qwen3_next")
        state: dict[str, torch.Tensor] = {}
        for shard in sorted(source.glob("*.safetensors")):
            state |= load_file(shard)
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        if format == "one safetensors file":
            save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        elif format == "one .bin":
            torch.save(state, tmp_path / "pytorch_model.bin")
        else:
            torch.save(state, tmp_path / "pytorch_model-00001-of-00001.bin")
            weight_map = dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")
            index = {"metadata": {}, "weight_map": weight_map}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        target = AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = load_mtp(target_of("qwen3_next")).state_dict()
        found = load_mtp(target).state_dict()
        assert {k: v.tolist() for k, v in found.items()} == {
            k: v.tolist() for k, v in expected.items()
        }

    def test_eight_bit_weights_with_block_factors(self, tmp_path):
        """As DeepSeek-V3 is published; factors are for blocks of 128 x 128."""
        folder = copy_of("deepseek_v3", tmp_path)
        shard = folder / "model-00002-of-00002.safetensors"
        state = load_file(shard)
        key = "model.layers.3.self_attn.o_proj.weight"
        weight = state[key]
        scale = weight.abs().max() / 448
        state[key] = (weight / scale).to(torch.float8_e4m3fn)
        state[key + "_scale_inv"] = scale.reshape(1, 1)
        rewrite(folder, shard, state)
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        blocks: Any = load_mtp(target).blocks
        found = blocks[0][0].self_attn.o_proj.weight
        torch.testing.assert_close(found, weight, atol=float(scale) * 20, rtol=0.1)
        assert found.dtype == torch.float32


def test_factors_of_blocks_at_the_edges():
    """Weights of more than one block, the last ones cut off."""
    weight = torch.arange(200 * 150).reshape(200, 150).float().fmod(7).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    found = checkpoint_mtp._dequantize(
        {"x.weight": weight, "x.weight_scale_inv": scale}, torch.float32
    )
    assert list(found) == ["x.weight"]
    for row, column in ((0, 0), (127, 127), (127, 128), (128, 127), (199, 149)):
        factor = scale[row // 128, column // 128]
        assert found["x.weight"][row, column] == weight[row, column].float() * factor


def copy_of(name: str, folder: Path) -> Path:
    """A copy of a family's checkpoint that a test may change."""
    shutil.copytree(mtp_checkpoints.write(name), folder, dirs_exist_ok=True)
    return folder


def rewrite(folder: Path, shard: Path, state: dict[str, torch.Tensor]) -> None:
    """Replace a shard, and say so in the index."""
    save_file(state, shard, {"format": "pt"})
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    kept = {k: v for k, v in index["weight_map"].items() if v != shard.name}
    index["weight_map"] = kept | dict.fromkeys(state, shard.name)
    file.write_text(json.dumps(index))


class EightBitLinear(torch.nn.Module):
    """Weights of 8 bits with a scale for each row, as weight-only quantization keeps them."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = torch.nn.Buffer((linear.weight.detach() / scale).round().to(torch.int8))
        self.scale = torch.nn.Buffer(scale)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.weight * self.scale)


def test_a_quantized_target_keeps_its_layers_in_full_precision():
    target = mtp_checkpoints.load("qwen3_5")
    for module in list(target.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, EightBitLinear(child))
    target.config.quantization_config = {"quant_method": "of this test"}
    network: Any = mtp_network(target)
    exact: Any = load_mtp(target_of("qwen3_5"))
    assert not hasattr(network.config, "quantization_config")
    for ours, theirs in zip(network.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    inputs = batch(3)
    expected = row_by_row(target, inputs, **GREEDY)
    output = target.generate(**inputs, **GREEDY, use_mtp=True)
    assert new_tokens(output, inputs, [NEW] * 3) == expected


class TestUseMTP:
    @pytest.mark.parametrize("where", ["argument", "config", "own config"])
    def test_it_runs_here_in_batches(self, where):
        target, inputs = mtp_checkpoints.load("deepseek_v3"), batch(3)
        expected = row_by_row(target, inputs, **GREEDY)
        kwargs: dict[str, Any] = {"return_dict_in_generate": True}
        if where == "argument":
            kwargs["use_mtp"] = True
        elif where == "config":
            kwargs["generation_config"] = copy.deepcopy(target.generation_config)
            kwargs["generation_config"].use_mtp = True
        else:
            target.generation_config.use_mtp = True
        output = target.generate(**inputs, **GREEDY, **kwargs)
        assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected
        assert output.speculation.num_drafts > 0
        if where == "own config":
            plain = target.generate(**inputs, **GREEDY, use_mtp=False, return_dict_in_generate=True)
            assert not hasattr(plain, "speculation")

    @pytest.mark.filterwarnings("ignore:num_speculative_tokens=2 is more than")
    def test_it_comes_before_what_is_attached(self, monkeypatch):
        target, inputs = mtp_checkpoints.load("qwen3_next"), batch(1)
        own = mtp_network(target)
        hf_specdec.attach(target, {"model": own, "num_speculative_tokens": 2})
        both = [
            target.generate(
                **inputs, **GREEDY, **kwargs, return_dict_in_generate=True
            ).speculation.per_position
            for kwargs in ({}, {"use_mtp": True})
        ]
        assert [len(p) for p in both] == [2, 1]

    def test_other_families_are_transformers_business(self, make_target):
        with pytest.raises(ValueError, match="num_mtp_layers"):
            make_target("llama").generate(torch.tensor([[5, 6]]), use_mtp=True, max_new_tokens=2)


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "glm_ocr", "hy_v3", "mimo_v2_flash", "qwen3_next", "ernie4_5_moe"]
)
def test_weights_are_named_in_messages_as_they_are_published(name):
    target = target_of(name)
    network = load_mtp(target)
    stored = load_file(mtp_checkpoints.write(name) / "model-00002-of-00002.safetensors")
    layers = target.config.get_text_config().num_hidden_layers
    key = next(k for k in stored if network.family.locate(k, layers))
    names = [k for k in network.state_dict() if re.search("norm|projection|o_proj", k)]
    for own in names:
        published = network.family.published(own, key, layers)
        assert published in stored or "post_attention" in own, own
    assert len(names) > 5


class TestWrongCheckpoints:
    def test_weights_that_are_missing_are_named(self, tmp_path):
        folder = copy_of("glm4_moe", tmp_path)
        shard = folder / "model-00002-of-00002.safetensors"
        state = load_file(shard)
        del state["model.layers.3.eh_proj.weight"]
        rewrite(folder, shard, state)
        target = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(
            ValueError, match=r"glm4_moe_mtp.*layers\.3\.eh_proj\.weight \(missing\)"
        ):
            hf_specdec.attach(target, {"method": "mtp"})

    def test_weights_of_another_shape_are_named(self, tmp_path):
        folder = copy_of("glm4_moe", tmp_path)
        shard = folder / "model-00002-of-00002.safetensors"
        state = load_file(shard)
        state["model.layers.3.eh_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        rewrite(folder, shard, state)
        target = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match=r"layers\.3\.eh_proj\.weight \(shape .*needs"):
            load_mtp(target)

    def test_fewer_modules_than_declared(self, tmp_path):
        folder = copy_of("glm4_moe", tmp_path)
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 2
        (folder / "config.json").write_text(json.dumps(config))
        target = AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match=r"declares 2 MTP module.*layers\.4\.hnorm\.weight"):
            load_mtp(target)

    def test_weights_that_nothing_reads_are_told(self, tmp_path, caplog):
        folder = copy_of("glm4_moe", tmp_path)
        shard = folder / "model-00002-of-00002.safetensors"
        rewrite(folder, shard, load_file(shard) | {"model.layers.3.surprise": torch.zeros(1)})
        load_mtp(AutoModelForCausalLM.from_pretrained(folder))
        assert "blocks.0.0.surprise" in caplog.text

    def test_a_checkpoint_without_them(self, tmp_path):
        target_of("qwen3_5").save_pretrained(tmp_path)
        target = AutoModelForCausalLM.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="holds no MTP weights.*save_pretrained"):
            hf_specdec.attach(target, {"method": "mtp"})
        assert "_hf_specdec_attachment" not in target.__dict__

    def test_a_target_that_came_from_nowhere(self):
        target = AutoModelForCausalLM.from_config(mtp_checkpoints.config_of(FAMILIES["qwen3_5"]))
        with pytest.raises(ValueError, match=r"name_or_path is empty.*from_pretrained"):
            load_mtp(target)

    def test_a_checkpoint_that_is_gone(self, tmp_path):
        target = mtp_checkpoints.load("qwen3_5")
        target.config.name_or_path = str(tmp_path)
        with pytest.raises(ValueError, match=r"has none of.*model\.safetensors"):
            load_mtp(target)

    def test_a_shard_that_is_gone(self, tmp_path):
        folder = copy_of("qwen3_5", tmp_path)
        target = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match="lacks model-00002-of-00002"):
            load_mtp(target)

    def test_a_family_that_is_not_known(self, make_target):
        with pytest.raises(ValueError, match="no family whose MTP layers are known"):
            load_mtp(make_target("llama"))

    def test_k_that_is_no_multiple_of_the_modules(self):
        target = target_of("step3p7")
        with pytest.raises(ValueError, match="num_assistant_tokens=4 must be a multiple of 3"):
            target.generate(**batch(1), assistant_model=mtp_network(target), num_assistant_tokens=4)


def test_a_network_of_another_target_is_refused():
    network: MTPModel = load_mtp(target_of("qwen3_5"))
    with pytest.raises(ValueError, match="MTP layers of another model object"):
        mtp_checkpoints.load("qwen3_5").generate(**batch(1), assistant_model=network)
