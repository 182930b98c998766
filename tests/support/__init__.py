"""What several tests share: one folder for each part of the project, and here what all of them use."""
