"""Files on disk: episodes, annotations, metrics, stages, and the folder of a run."""
