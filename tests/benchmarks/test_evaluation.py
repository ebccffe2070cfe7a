"""What a run may evaluate on its way, of two steps."""

from benchmarks import evaluation


def test_the_mean_of_replicas_is_what_an_exact_synchronization_would_evaluate(monkeypatch):
    monkeypatch.setattr(evaluation, "AT", (2,))
    row = evaluation.run_row("CocktailSGD, no delay, 88x", seed=0, steps=2)
    losses = row["losses"]["2"]
    # 88x in two steps: the consensus has hardly moved, and the replicas have.
    assert losses["mean"] < losses["consensus"] and losses["replicas"] < losses["consensus"]
    assert losses["mean"] != losses["replicas"]
