"""The learner in processes of its own: what travels, the driver's side, the ranks' side, and how they are started."""
