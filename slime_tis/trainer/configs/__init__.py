"""Options of the trainer: one frozen dataclass per subject."""
