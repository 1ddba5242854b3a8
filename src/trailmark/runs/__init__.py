"""What is on disk: episodes, annotations, metrics, and the folder that holds a run."""
