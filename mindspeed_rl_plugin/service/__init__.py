"""What a job exchanges with processes outside of it: invitations, news, prompts, and which rows they may commit."""
