"""Exchange between a job and processes outside of it: invitations, news, prompts, and which rows they may commit."""
