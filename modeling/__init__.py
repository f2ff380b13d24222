"""The networks of hf_specdec: ``PreTrainedModel`` subclasses and their configs.

Boundary: everything here maps hidden states and token ids to logits or draft ids. Nothing here
    knows about
``generate``, caches or acceptance, and nothing here imports the engine (the rest of
``hf_specdec``). Each model family is a folder; importing this package imports none of them.
"""
