// The symbols that a shared library of this package exports, for the others to link against. All others are hidden.

#pragma once

#define FASTFORMER_API __attribute__((visibility("default")))
