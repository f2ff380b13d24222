"""The presets' numbers are the published ones, and their parts fit together."""

import pytest

from hf_specdec.training.recipes import recipe


def test_the_numbers_of_ibm():
    """As in scripts/train_speculator.sh of fms-fsdp."""
    ibm = recipe("ibm", "mlp")
    network, corpus, training = ibm.network, ibm.corpus, ibm.training
    assert (network.heads, network.inner_dim) == (3, 4096)
    assert network.tie_weights and network.scale_input and network.initialize == "random"
    assert not network.share_target_weights and not network.draft_vocab_size
    assert (corpus.prompt_tokens, corpus.answer_tokens, corpus.sample_top_k) == (64, 256, 10)
    temperatures = corpus.temperatures
    assert (temperatures.greedy_share, temperatures.low, temperatures.high) == (0, 1, 1)
    # 3.93 and 1.18 billion tokens, positions of all steps.
    assert corpus.text_tokens == 15_000 * 8 * 8 * 4096
    assert corpus.tokens == 6_000 * 8 * 96 * 256
    first, second = training.ground_truth, training.self_generated
    assert (first.warmup_steps(15_000), second.warmup_steps(6_000)) == (750, 300)
    rate = training.learning_rate
    assert rate * first.factor(749, 15_000) == pytest.approx(1e-3, rel=0.01)
    assert rate * first.factor(14_999, 15_000) == pytest.approx(1e-4)
    assert rate * second.factor(299, 6_000) == pytest.approx(1e-4, rel=0.01)
    assert rate * second.factor(5_999, 6_000) == pytest.approx(1e-5)
    assert training.weights_of(3) == (1, 1, 1)
    assert (training.betas, training.weight_decay, training.clip_norm) == ((0.9, 0.95), 0.1, 1)
    assert (training.seed, training.precision, training.objective) == (42, "bf16", "cross_entropy")


def test_head_weights():
    assert recipe("small", "mlp").training.weights_of(3) == pytest.approx((1, 0.8, 0.64))


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("large", "mlp", "'large' is no preset; there are ibm, small"),
        ("small", "eagle", "kind='eagle' must be"),
        ("ibm", "mtp", "for kind='mtp' use preset='small'"),
    ],
)
def test_refusals(name, kind, match):
    with pytest.raises(ValueError, match=match):
        recipe(name, kind)
