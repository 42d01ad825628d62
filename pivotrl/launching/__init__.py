"""A recipe's stages as SLURM jobs: scripts, code snapshot, submission, the check of nodes, and what is asked about them afterwards."""
