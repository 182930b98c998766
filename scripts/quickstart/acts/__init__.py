"""The five acts of the tour. Each is a function of a `Stage` that measures something and returns an `ActResult`."""
