"""Initial weights keep the geometry of the target's tables and have the scale the network wants."""

import pytest
import torch

from hf_specdec.training import initialize_from_target, new_speculator
from hf_specdec.training.initialization import project_table, root_mean_square


def similarities(table):
    return torch.nn.functional.normalize(table, dim=1) @ torch.nn.functional.normalize(table).T


@pytest.mark.parametrize(("width", "least"), [(8, 0.9), (16, 0.9999), (48, 0.9999)])
def test_similarities_survive(width, least):
    # Most of the variance lies in a few directions, as in real tables.
    table = torch.randn(60, 16) * torch.linspace(3, 0.1, 16)
    projected = project_table(table, width, torch.Generator())
    assert root_mean_square(projected) == pytest.approx(width**-0.5, rel=1e-4)
    pairs = torch.stack([similarities(table).flatten(), similarities(projected).flatten()])
    assert torch.corrcoef(pairs)[0, 1] > least


@pytest.mark.parametrize("reduced", [False, True])
def test_own_tables(target, make_speculator, reduced):
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    model = make_speculator(inner_dim=48, draft_vocab_size=20 if reduced else 0)
    ids = torch.arange(3, 63, 3) if reduced else torch.arange(64)
    if reduced:
        model.set_draft_token_ids(ids)
    initialize_from_target(model, *tables)
    network = model.speculator
    for index in range(model.config.n_predict):
        for name, table in (("emb", tables[0]), ("head", tables[1][ids])):
            own = getattr(network, name)[index].weight
            torch.testing.assert_close(similarities(own), similarities(table), rtol=0, atol=1e-3)
            assert root_mean_square(own) == pytest.approx(48**-0.5, rel=1e-3)


def test_shared_tables(target, make_speculator):
    model = make_speculator(inner_dim=48, share_target_weights=True)
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    scaled = 7 * tables[0].detach()
    initialize_from_target(model, scaled, tables[1])
    for projection in model.speculator.emb_proj:
        embedded = projection(scaled)
        assert root_mean_square(embedded) == pytest.approx(48**-0.5, rel=0.2)


def test_tables_of_another_target(make_speculator):
    with pytest.raises(ValueError, match=r"lm_head_weight must be \[at least 64, 32\]"):
        initialize_from_target(make_speculator(), torch.zeros(64, 32), torch.zeros(64, 16))


def test_new_speculator(target, markov_corpus):
    model = new_speculator(target, inner_dim=24, n_predict=2, share_target_weights=True)
    assert model.dtype == torch.float32
    assert model.propose(torch.randn(3, 32), torch.tensor([1, 2, 3])).shape == (3, 2)
    same = new_speculator(target, inner_dim=24, n_predict=2, share_target_weights=True)
    assert all(map(torch.equal, model.state_dict().values(), same.state_dict().values()))
    with pytest.raises(ValueError, match="draft_vocab_size=9 needs a corpus"):
        new_speculator(target, draft_vocab_size=9)
