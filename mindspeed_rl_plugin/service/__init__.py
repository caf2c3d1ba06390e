"""Exchange between a job and processes outside of the job: invitations, news, prompts, and what they may commit."""
