"""Measuring a pair: paired runs with and without a drafter, on built-in or own prompts.

    pair = Pair(target, tokenizer, assistant)
    workload = Workload(prompt_sets(["chat", "code"]), ks=[1, 3], batches=[1, 8])
    check(pair, workload)
    rows = list(measure(pair, workload))

``hf-specdec bench`` is the same from the command line.
"""

from hf_specdec.benchmarking.calls import Pair
from hf_specdec.benchmarking.measurement import check, default_draft_tokens, measure
from hf_specdec.benchmarking.prompt_sets import PROMPT_SETS, prompt_sets
from hf_specdec.benchmarking.results import Report, Row, Spread
from hf_specdec.benchmarking.synthetic import SyntheticDrafter
from hf_specdec.benchmarking.workload import Workload

__all__ = [
    "PROMPT_SETS",
    "Pair",
    "Report",
    "Row",
    "Spread",
    "SyntheticDrafter",
    "Workload",
    "check",
    "default_draft_tokens",
    "measure",
    "prompt_sets",
]
