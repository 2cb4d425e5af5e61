"""Checkpoints: ``store`` writes, verifies, finds and prunes them, and guards the run folder."""
