"""Lightning data modules: text, and the recall tasks."""
