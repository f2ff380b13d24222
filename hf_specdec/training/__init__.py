"""How a drafter is trained for a target, and written as a checkpoint."""
