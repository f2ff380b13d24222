"""Presets hold the published numbers, and the learning rate goes where they say."""

import pytest

from hf_specdec.training import StageSettings, TrainingSettings, preset


def test_ibm_numbers():
    ibm = preset("ibm")
    assert (ibm.learning_rate, ibm.betas, ibm.weight_decay) == (1e-3, (0.9, 0.95), 0.1)
    assert (ibm.clip_norm, ibm.head_decay, ibm.objective) == (1.0, 1.0, "cross_entropy")
    first, second = ibm.ground_truth, ibm.self_generated
    assert (first.steps, second.steps) == (15_000, 6_000)
    assert (first.batch_size, second.batch_size) == (262_144, 196_608)
    assert first.warmup_steps(15_000) == 750
    assert second.warmup_steps(6_000) == 300
    assert first.factor(14_999, 15_000) == pytest.approx(0.1)
    assert second.factor(5_999, 6_000) == pytest.approx(0.01)
    peak = max(second.factor(step, 6_000) for step in range(6_000))
    assert peak == pytest.approx(0.1, rel=0.01)
    # A parabola: half way through the warm-up three quarters are reached.
    assert first.factor(374, 15_000) == pytest.approx(0.75)


def test_small_numbers():
    small = preset("small")
    assert (small.learning_rate, small.head_decay, small.distill_top_k) == (2e-3, 0.8, 8)
    assert small.objective == "distillation"
    assert small.self_generated.epochs == 3.0


def test_linear_warm_up_and_cosine():
    stage = StageSettings(peak=1.0, final=0.2, warmup_share=0.1, warmup_most=50)
    assert stage.factor(4, 100) == pytest.approx(0.5)
    assert stage.factor(49, 100) == pytest.approx(0.6)
    assert stage.factor(99, 100) == pytest.approx(0.2)


def test_steps_follow_from_epochs():
    assert StageSettings(epochs=2.5, batch_size=10).num_steps(400) == 100
    assert StageSettings(steps=7).num_steps(400) == 7
    assert StageSettings(epochs=0.1, batch_size=10).num_steps(4) == 1


def test_changes_to_a_preset():
    assert preset("ibm", seed=7).seed == 7
    with pytest.raises(ValueError, match="name='huge' is no preset; there are ibm, small"):
        preset("huge")


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        (StageSettings, {"steps": 0}, "steps=0"),
        (StageSettings, {"epochs": 0}, "epochs=0"),
        (StageSettings, {"batch_size": 0}, "batch_size=0"),
        (StageSettings, {"peak": 0.1, "final": 0.2}, "final=0.2"),
        (StageSettings, {"warmup_shape": "steep"}, "warmup_shape='steep'"),
        (TrainingSettings, {"objective": "mse"}, "objective='mse' must be one of"),
        (TrainingSettings, {"precision": "fp8"}, "precision='fp8'"),
        (TrainingSettings, {"save_dtype": "int8"}, "save_dtype='int8'"),
        (TrainingSettings, {"distill_top_k": 0}, "distill_top_k=0"),
        (TrainingSettings, {"num_sampled": -1}, "num_sampled=-1"),
    ],
)
def test_refusals(kind, fields, match):
    with pytest.raises(ValueError, match=match):
        kind(**fields)
