"""A server of completions: states kept by prefix, requests decoded together, OpenAI's HTTP interface."""
