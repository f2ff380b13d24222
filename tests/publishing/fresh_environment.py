"""Run the examples of published cards, and check what they leave behind; not a test itself.

    python fresh_environment.py FOLDER with|without

FOLDER holds the folders drafter and mtp, as published, and target. Started by
`test_fresh_environment`, with hf_specdec or in an environment where it isn't installed.
"""

import importlib.util
import re
import sys
from pathlib import Path

HERE, WHICH = Path(sys.argv[1]), sys.argv[2]
REMOTE = "transformers_modules."


def examples(name: str) -> list[str]:
    """The Python examples of a card, with the Hub ids in them replaced by folders."""
    card = (HERE / name / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ids = {"owner/tiny-target": HERE / "target", "me/tiny-drafter": HERE / "drafter",
           "me/tiny-mtp": HERE / "mtp"}  # fmt: skip
    for name, folder in ids.items():
        found = [code.replace(f'"{name}"', repr(str(folder))) for code in found]
    assert "owner/" not in "".join(found) and "me/" not in "".join(found)
    return found


def run(code: str) -> dict:
    """Run an example; returns its variables."""
    variables: dict = {}
    exec(compile(code, "example", "exec"), variables)
    return variables


def plain(variables: dict) -> list:
    """What the target of an example says without any drafter."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(HERE / "target")
    return target.generate(**variables["inputs"], max_new_tokens=100).tolist()


def without() -> None:
    """Remote code and custom_generate, where hf_specdec is not installed."""
    assert importlib.util.find_spec("hf_specdec") is None
    _, with_custom_generate, network_alone = examples("drafter")
    variables = run(with_custom_generate)
    assert variables["sequences"].tolist() == plain(variables)
    assert type(run_drafter := run(network_alone)["drafter"]).__module__.startswith(REMOTE)
    assert run(network_alone)["draft"].shape == (1, run_drafter.config.n_predict)
    # It can be saved again, with its code.
    from transformers import AutoModel

    run_drafter.save_pretrained(HERE / "again")
    again = AutoModel.from_pretrained(HERE / "again", trust_remote_code=True)
    assert type(again).__name__ == "MLPSpeculatorPreTrainedModel"
    _, plain_model = examples("mtp")
    variables = run(plain_model)
    assert variables["sequences"].tolist() == plain(variables)
    assert type(variables["target"]).__module__.startswith(REMOTE)
    assert not [name for name in sys.modules if name.startswith("hf_specdec")]


def with_() -> None:
    """The same folders where hf_specdec is installed: its classes win."""
    from transformers import AutoModel

    copy = AutoModel.from_pretrained(HERE / "drafter", trust_remote_code=True)
    assert type(copy).__module__.startswith(REMOTE)
    with_hf_specdec, with_custom_generate, network_alone = examples("drafter")
    variables = run(with_hf_specdec)
    import hf_specdec

    expected = plain(variables)
    assert variables["out"].sequences.tolist() == expected
    assert type(variables["drafter"]) is hf_specdec.MLPSpeculatorPreTrainedModel
    # A copy that was loaded before hf_specdec was imported serves too.
    target, inputs = variables["target"], variables["inputs"]
    out = target.generate(**inputs, assistant_model=copy, max_new_tokens=100)
    assert out.tolist() == expected
    assert run(with_custom_generate)["sequences"].tolist() == expected
    drafter = run(network_alone)["drafter"]
    assert type(drafter) is hf_specdec.MLPSpeculatorPreTrainedModel
    with_mtp, plain_model = examples("mtp")
    for code in (with_mtp, plain_model):
        variables = run(code)
        assert type(variables["target"]).__module__ == "hf_specdec.modeling.mimo.modeling_mimo"
        sequences = variables["out"].sequences if code is with_mtp else variables["sequences"]
        assert sequences.tolist() == plain(variables)


{"with": with_, "without": without}[WHICH]()
print("as the cards say")
