"""The commands of `linrope`. A new command is a line here and a module of its name with `run(args)`."""

COMMANDS = {
    "fit": "Train a model: a language model, or that of another task (--task).",
    "validate": "Measure a checkpoint on the validation split: by position in the row, and in longer rows (--lengths).",
    "test": "Measure a checkpoint on the test split.",
    "predict": "Write a checkpoint's predictions for the test split as JSON lines.",
    "plan": "Estimate a run before it starts: memory by length, FLOPs, time.",
    "compare": "Compare runs: validation and training loss by tokens and by time, in a table and a picture.",
    "recall": "Measure what a model recalls, by length and depth: a pass key in text, or an induction step.",
    "generate": "Generate text with a trained model.",
    "serve": "Serve a trained model over HTTP, as OpenAI's completions.",
    "prepare": "Tokenize text once, into a folder to train from.",
    "average": "Write the mean of the weights of several checkpoints.",
    "convert": "Make a hybrid of a softmax language model: linear attention in chosen layers, the same weights.",
    "export": "Write a trained model for transformers: safetensors, config.json, tokenizer.",
    "info": "Print versions, the processor, and which backends work here.",
}
"""Name and help line of each command, in the order of `linrope --help`."""
