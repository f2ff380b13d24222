"""Bad input: a clear error that names the argument, before any forward, nothing left behind."""

import pytest
import torch
from tiny_models import HIDDEN_SIZE, VOCAB_SIZE, ScriptedDrafter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    T5Config,
)

import hf_specdec


@pytest.fixture
def refused(make_speculator, prompts):
    """``refused(target, match, **kwargs)``: generate raises, and no forward has run."""

    def check(target, match, drafter=None, inputs=None, **kwargs):
        forwards = []
        handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
        inputs = prompts(1) if inputs is None else inputs
        if "assistant_model" not in kwargs:
            kwargs["assistant_model"] = make_speculator() if drafter is None else drafter
        try:
            with pytest.raises(ValueError, match=match):
                target.generate(**{"max_new_tokens": 5, **inputs, **kwargs})
        finally:
            handle.remove()
        assert not forwards
        head = target.get_output_embeddings()
        assert head is None or not head._forward_pre_hooks

    return check


def test_hidden_size_of_another_target(target, refused, make_speculator):
    other = make_speculator(emb_dim=48, base_model_name_or_path="some/llama")
    refused(target, r"emb_dim=48.*hidden_size=32.*trained for some/llama", other)


def test_vocabulary_too_small(refused, make_speculator):
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE + 257,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    big = AutoModelForCausalLM.from_config(config)
    refused(big, "vocab_size=64.*vocab_size=321", make_speculator())


@pytest.mark.parametrize("extra", [-20, 40])
def test_vocabularies_padded_by_a_few_ids_work(target, make_speculator, prompts, extra):
    speculator = make_speculator(vocab_size=VOCAB_SIZE + extra)
    for settings in ({"do_sample": False}, {"do_sample": True, "verification": "rejection"}):
        torch.manual_seed(0)
        output = target.generate(
            **prompts(3), max_new_tokens=20, assistant_model=speculator, **settings
        )
        assert output.max() < VOCAB_SIZE
    plain = target.generate(**prompts(3), max_new_tokens=20, do_sample=False)
    ours = target.generate(
        **prompts(3), max_new_tokens=20, do_sample=False, assistant_model=speculator
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("k", [5, -1, 1.5, True])
def test_number_of_draft_tokens(target, refused, k):
    refused(target, rf"num_assistant_tokens={k}.*from 0 to 4", num_assistant_tokens=k)


def test_number_of_draft_tokens_in_the_generation_config(target, refused):
    config = hf_specdec.integration.GenerationConfig(num_assistant_tokens=9, max_new_tokens=5)
    refused(
        target,
        r"generation_config.num_assistant_tokens=9.*from 0 to 4",
        generation_config=config,
        max_new_tokens=None,
    )


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [0, 1, 1, 0]])
def test_right_padding(target, refused, mask):
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 7, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], mask]),
    }
    refused(target, r"rows \[1\].*padding_side='left'", inputs=inputs)


def test_encoder_decoder_target(refused):
    target = AutoModelForSeq2SeqLM.from_config(
        T5Config(
            vocab_size=VOCAB_SIZE, d_model=HIDDEN_SIZE, d_ff=16, num_layers=1, num_heads=2, d_kv=8
        )
    )
    refused(target, "encoder-decoder")


def test_target_with_a_recurrent_state(refused):
    target = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_hidden_layers=1)
    )
    refused(target, "recurrent state.*only known to be right for .*bamba")


def test_target_with_layers_that_cant_roll_back(refused, make_target):
    import copy

    target = copy.deepcopy(make_target("llama"))
    target.config.layer_types = ["full_attention", "linear_attention"] * 2
    refused(target, "linear_attention.*can't be rolled back")


def test_target_without_positions_or_without_a_head(refused, make_target):
    class NoPositions(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            raise AssertionError("not to be run")

    class NoHead(LlamaForCausalLM):
        def get_output_embeddings(self):
            return None

    config = make_target("llama").config
    refused(NoPositions(config), "NoPositions takes no position_ids")
    refused(NoHead(config), r"NoHead has no output embeddings \(lm_head\)")


def test_attention_without_a_mask_for_every_row(refused, make_target):
    import copy

    target = copy.deepcopy(make_target("llama"))
    target.config._attn_implementation = "paged|eager"
    refused(target, "attn_implementation='paged.eager'.*'sdpa' or 'eager'")


def test_assistant_on_another_device(target, refused, make_speculator):
    refused(target, r"device meta.*on cpu.*\.to\('cpu'\)", make_speculator().to("meta"))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size=0"),
        ({"verification": "typical"}, r"verification='typical'.*\['match', 'rejection'\]"),
        ({"do_sample": True, "row_seeds": [1, 2]}, r"row_seeds=\[1, 2\] must hold 1 integers"),
        ({"do_sample": True, "row_seeds": ["a"]}, "row_seeds"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_settings(target, refused, kwargs, match):
    refused(target, match, **kwargs)


def test_empty_batch(target, refused):
    ids = torch.empty(0, 4, dtype=torch.long)
    mask = torch.empty(0, 4, dtype=torch.long)
    refused(target, "batch is empty", inputs={"input_ids": ids, "attention_mask": mask})


def test_streamer_with_a_batch(target, refused, prompts):
    class Streamer:
        def put(self, value):
            pass

        def end(self):
            pass

    refused(target, "streamer takes one row.*3 rows", inputs=prompts(3), streamer=Streamer())


def test_guidance_with_a_batch(target, refused, prompts):
    refused(target, "guidance_scale with a batch of 3", inputs=prompts(3), guidance_scale=2.0)


def test_a_processor_that_cant_be_copied_for_every_row(target, refused, prompts):
    import threading

    class Locked(LogitsProcessor):
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, input_ids, scores):
            return scores

    processors = LogitsProcessorList([Locked()])
    refused(target, "Locked that can't be copied", inputs=prompts(3), logits_processor=processors)
    # Alone it needs no copy.
    speculator = ScriptedDrafter([[0]])
    target.generate(
        **prompts(1),
        assistant_model=speculator,
        num_assistant_tokens=0,
        logits_processor=processors,
        max_new_tokens=2,
    )


def test_an_error_in_the_middle_leaves_nothing_behind(target, prompts):
    class Breaks(ScriptedDrafter):
        def propose(self, *args, **kwargs):
            raise RuntimeError("broken drafter")

    plain = target.generate(**prompts(1), max_new_tokens=8, do_sample=False)
    with pytest.raises(RuntimeError, match="broken drafter"):
        target.generate(**prompts(1), max_new_tokens=8, assistant_model=Breaks([[]]))
    assert not target.get_output_embeddings()._forward_pre_hooks
    assert torch.equal(plain, target.generate(**prompts(1), max_new_tokens=8, do_sample=False))
