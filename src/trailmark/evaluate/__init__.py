"""How good is it, how sure are we, and which is better: evaluation, comparison, studies. Nothing heavy is imported here."""
