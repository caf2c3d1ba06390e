"""Episodes: a response of several turns, between which tools and environments of the user answer the model."""
