"""Draft models: one for a target that has none, and one driven by this library's loop.

`fitted_draft_model` makes one of a target's first layers, with a head fitted to them.

A small causal model trained together with the target would be better, and there is none for the
demo's. Cut off behind layer N, a Llama's state is multiplied with its output head although that
head reads another layer's states. Here a linear map from the states of layer N to those behind the
final norm is fitted by least squares on texts of the target ("tuned lens": Belrose et al. 2023,
arXiv 2303.08112) and folded into the head, so that the draft model is an ordinary Llama.
"""

import copy

import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_specdec import Drafter

RIDGE = 1e-3
ROWS = 8


def fitted_draft_model(target, layers, texts):
    """A Llama of the target's first layers, whose weights it shares; the head is its own.

    Args:
        target: a Llama.
        layers: how many to keep.
        texts: int64 ``[N, T]``, what the head is fitted to.

    Returns:
        The model, in the target's dtype, for ``assistant_model``.
    """
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    config.tie_word_embeddings = False
    with torch.device("meta"):
        draft = LlamaForCausalLM(config)
    draft.model.embed_tokens = target.model.embed_tokens
    draft.model.layers = target.model.layers[:layers]
    draft.model.rotary_emb = target.model.rotary_emb
    draft.model.norm = copy.deepcopy(target.model.norm)
    translation = _fit(target, layers, texts)
    head = target.lm_head.weight
    with torch.no_grad():
        draft.model.norm.weight.fill_(1.0)
        weight = (head.float() @ translation.T).to(head.dtype)
    # Row by row: state @ translation, then the target's head.
    draft.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.eval()


def _fit(target, layers, texts):
    """The map ``[d, d]``: normed states of layer N, times it, are near those of the final norm."""
    size = target.config.hidden_size
    covariance, product = torch.zeros(2, size, size, dtype=torch.float64)
    for rows in texts.split(ROWS):
        with torch.inference_mode():
            # The last of the states are behind the final norm.
            states = target.model(rows, output_hidden_states=True).hidden_states
        early, late = (states[i].flatten(0, 1).double() for i in (layers, -1))
        early = early * early.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        covariance += early.T @ early
        product += early.T @ late
    covariance += RIDGE * covariance.trace() / size * torch.eye(size)
    return torch.linalg.solve(covariance, product).float()


class DraftModelDrafter(Drafter):
    """A small causal model as a drafter of this library's loop, for one row.

    transformers runs ``generate`` of the draft model anew in every step. Here it is K forwards on a
    cache that is cropped to what was accepted.

    Args:
        model: of the target's vocabulary.
        num_tokens: K.
    """

    def __init__(self, model, num_tokens):
        self.model = model
        self._num_tokens = num_tokens

    @property
    def max_draft_tokens(self):
        """K."""
        return self._num_tokens

    def check(self, target):
        """Nothing that a benchmark gets wrong."""

    def start(self, target, prompt=None, num_draft_tokens=None):
        """Run the prompt but for its last token, which the first `observe` brings."""
        if prompt.num_rows != 1:
            raise ValueError(f"a draft model takes one row here, not {prompt.num_rows}")
        self._cache = DynamicCache(config=self.model.config)
        self._pending = prompt.input_ids[:, :0]
        if prompt.input_ids.shape[1] > 1:
            self.model(prompt.input_ids[:, :-1], cache=self._cache, logits_to_keep=1)
        self._known = prompt.input_ids.shape[1] - 1

    def observe(self, step):
        """Drop what was rejected from the cache; note what it lacks of what was accepted."""
        right = step.input_ids[:, : step.host_num_accepted[0] + 1]
        self._known += right.shape[1]
        behind = self._cache.get_seq_length() - self._known
        if behind > 0:
            self._cache.crop(-behind)
        self._pending = right[:, right.shape[1] - max(-behind, 0) :]

    def propose(self, token_ids, num_draft_tokens, pick=None):
        """K forwards; the first one also over tokens that the cache lacks. Greedy alone."""
        ids = torch.cat([self._pending, token_ids[:, None]], dim=1)
        drafts = []
        for _ in range(num_draft_tokens):
            logits = self.model(ids, cache=self._cache, logits_to_keep=1).logits
            ids = logits.argmax(-1)
            drafts.append(ids)
        return torch.cat(drafts, dim=1)

    def keep_rows(self, order):
        """The one row ends with the call."""
