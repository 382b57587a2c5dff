// What a shared library of this package exports: the others are linked against it. All else is hidden.

#pragma once

#define FASTFORMER_API __attribute__((visibility("default")))
