"""What every worker does, under any rule."""
