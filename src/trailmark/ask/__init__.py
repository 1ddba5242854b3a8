"""Ask language models: judges, teachers and writers."""
