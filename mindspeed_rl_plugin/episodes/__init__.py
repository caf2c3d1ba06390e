"""Episodes: responses of several turns; between the turns, tools and environments of the user answer the model."""
