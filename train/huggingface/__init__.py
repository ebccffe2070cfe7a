"""Hugging Face folders (config.json and safetensors): read into runs and written back."""
