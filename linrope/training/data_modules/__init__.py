"""Lightning data modules: text, masked text, labelled texts, parallel text, and the recall tasks."""
