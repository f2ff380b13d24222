"""transformers' own loops, as they are, and driven by a drafter of this library."""

from contextlib import contextmanager

import hf_specdec


@contextmanager
def transformers_alone():
    """While the block runs, generate() is transformers' own: the library's seams are closed."""
    hf_specdec.disable()
    try:
        yield
    finally:
        hf_specdec.enable()


def transformers_loop(target, drafter, **kwargs):
    """``target.generate(**kwargs)`` by transformers' assisted loop, drafting with a `Drafter`.

    It is a CandidateGenerator as well, which proposes its ``default_draft_tokens`` each step. The
    loop is the one of prompt lookup, which needs no assistant, with its generator exchanged.
    """

    def candidates(*_args, **_kwargs):
        drafter.start(target)
        return drafter

    with transformers_alone():
        target._get_candidate_generator = candidates
        try:
            return target.generate(**kwargs, prompt_lookup_num_tokens=1)
        finally:
            del target._get_candidate_generator
