"""Extensions: what a run can do without (``rlpost.config.extensions`` lists this folder)."""
