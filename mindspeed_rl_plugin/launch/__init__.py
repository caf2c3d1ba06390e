"""Before the first step: argument checks, batch arithmetic, and where training starts."""
