"""A live page about runs, which reads their folders and changes nothing but the file that asks a run to stop."""
