"""A temperature alone is left to verification, which needs no divided copy of the logits."""

import pytest
import torch

from hf_specdec import decoding


@pytest.mark.parametrize(
    ("settings", "left_to_verification"),
    [
        ({"top_k": 0}, True),
        ({"top_k": 0, "verification": "rejection"}, True),
        ({"top_k": 5}, False),
        ({"top_k": 0, "repetition_penalty": 1.2}, None),
        ({"top_k": 0, "output_scores": True, "return_dict_in_generate": True}, False),
    ],
    ids=str,
)
def test_who_divides_by_the_temperature(
    target, make_speculator, prompts, monkeypatch, settings, left_to_verification
) -> None:
    """None: a processor that reads the prefix is asked position by position instead."""
    temperatures = []
    for name in ("verify_match", "verify_rejection"):
        verify = getattr(decoding, name)

        def spy(*args, verify=verify):
            temperatures.append(args[-1])
            return verify(*args)

        monkeypatch.setattr(decoding, name, spy)
    arguments = {"do_sample": True, "temperature": 0.6, "row_seeds": [3, 4], "max_new_tokens": 8}
    target.generate(
        **prompts(2), assistant_model=make_speculator(n_predict=2), **arguments, **settings
    )
    expected = {True: {0.6}, False: {None}, None: set()}[left_to_verification]
    assert set(temperatures) == expected


def test_the_text_does_not_depend_on_who_divides(target, make_speculator, prompts) -> None:
    arguments = {"do_sample": True, "temperature": 0.6, "top_k": 0, "row_seeds": [3, 4]}
    inputs, speculator = prompts(2), make_speculator(n_predict=2)
    texts = [
        target.generate(
            **inputs,
            assistant_model=speculator,
            max_new_tokens=12,
            return_dict_in_generate=True,
            output_scores=output_scores,
            **arguments,
        ).sequences
        for output_scores in (False, True)
    ]
    assert torch.equal(*texts)
