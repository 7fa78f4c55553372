"""Read and write Hugging Face model directories: settings, weights and adapters."""
