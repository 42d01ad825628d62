"""What `pivotrl doctor` looks at before a job is queued. A rule lives where it is enforced; its refusal becomes a finding."""
