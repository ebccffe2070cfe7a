"""Hugging Face's folders, of config.json and safetensors: read into runs and written back."""
