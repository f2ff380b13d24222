"""The runnable examples of a model card, each complete by itself."""

from __future__ import annotations

from hf_specdec.publishing.facts import CardFacts

_CHAT = """inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is a prime number?"}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)"""
_PLAIN = 'inputs = tokenizer("A prime number is", return_tensors="pt")'
_LOAD = """target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
{inputs}"""
_WITH = """import hf_specdec
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

{load}
drafter = AutoModel.from_pretrained("{repo}", dtype=target.dtype)

out = target.generate(
    **inputs, assistant_model=drafter, max_new_tokens=100, return_dict_in_generate=True
)
print(tokenizer.decode(out.sequences[0]))
print(out.speculation)"""
_CUSTOM = """from transformers import AutoModelForCausalLM, AutoTokenizer

{load}

sequences = target.generate(
    **inputs, custom_generate="{repo}", trust_remote_code=True, max_new_tokens=100
)
print(tokenizer.decode(sequences[0]))"""
_NETWORK = """import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

{load}
drafter = AutoModel.from_pretrained("{repo}", dtype=target.dtype, trust_remote_code=True)
{bind}
with torch.no_grad():
    output = target(**inputs, output_hidden_states=True)
token = output.logits[:, -1].argmax(-1)
draft = drafter.propose(output.hidden_states[-1][:, -1], token)
print(tokenizer.decode(token), "then probably", tokenizer.decode(draft[0]))"""
_BIND = """drafter.bind_target(
    target.get_input_embeddings().weight, target.get_output_embeddings().weight
)
"""
_MTP = """import hf_specdec
from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
hf_specdec.attach(target, {{"method": "mtp"}})

out = target.generate(**inputs, max_new_tokens=100, return_dict_in_generate=True)
print(tokenizer.decode(out.sequences[0]))
print(out.speculation)"""
_MTP_PLAIN = """from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
sequences = target.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(sequences[0]))"""
_NO_TARGET = "TARGET"


def examples(facts: CardFacts) -> list[str]:
    """Sections of the card, those that the folder's files allow."""
    is_mtp = facts.model_type == "mimo"
    target = facts.repo_id if is_mtp else facts.base_model or _NO_TARGET
    load = _LOAD.format(
        target=target,
        tokenizer=target,
        inputs=_CHAT if facts.has_chat_template else _PLAIN,
    )

    def block(template: str, load: str = load, **values: str) -> str:
        code = template.format(load=load, repo=facts.repo_id, **values)
        return f"```python\n{code}\n```"

    install = "```bash\npip install hf-specdec\n```"
    if is_mtp:
        found = [f"## Use\n\n{install}\n\n{block(_MTP)}"]
        if facts.has_remote_code:
            remote = load.replace('dtype="auto"', 'dtype="auto", trust_remote_code=True')
            found.append(
                "Without hf_specdec it is a plain model, whose code is in this repository:\n\n"
                + block(_MTP_PLAIN, remote)
            )
        return found
    text = "One prompt or a left-padded batch, greedy or sampled:"
    found = [f"## Use\n\n{install}\n\n{text}\n\n{block(_WITH)}"]
    if facts.has_custom_generate:
        found.append(
            "Without hf_specdec, one prompt at a time, with the loop in `custom_generate/`. The "
            "text is that of plain `generate`, under a seed also when sampling:\n\n"
            + block(_CUSTOM)
        )
    if facts.has_remote_code:
        bind = _BIND if facts.config.get("share_target_weights") else ""
        found.append(
            "The network alone, for a loop of your own; its code is in this repository:\n\n"
            + block(_NETWORK, bind=bind)
        )
    return found
