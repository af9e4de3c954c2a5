#pragma once

// Note [one build, several instruction sets]
// The package is compiled for the baseline of its architecture, so that a build runs on any machine of
// it. Where the compiler can, the inner loops are cloned for wider vectors and the loader chooses.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HYBRIDPAR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define HYBRIDPAR_CLONES
#endif
#if defined(__GNUC__)
#define HYBRIDPAR_INLINE inline __attribute__((always_inline))
#else
#define HYBRIDPAR_INLINE inline
#endif
// Before a loop of which no turn reads what another one has written, whatever its pointers suggest.
#if defined(__clang__)
#define HYBRIDPAR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define HYBRIDPAR_INDEPENDENT _Pragma("GCC ivdep")
#else
#define HYBRIDPAR_INDEPENDENT
#endif
