"""What survives a run: models, training states and their folder, and how a run resumes."""
