# What the CUDA flavour needs beside upstream's own rules: the toolkit's parts, architectures, our kernels.
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "The CUDA flavour needs nvcc, which was not found: install the CUDA toolkit, put its bin folder on PATH "
                        "or name nvcc in the environment variable CUDACXX.")
endif()
if(NOT PYGGML_SPEC_CUDA_ARCHITECTURES STREQUAL "default")
    if(PYGGML_SPEC_CUDA_ARCHITECTURES STREQUAL "native" AND CMAKE_VERSION VERSION_LESS 3.24)
        message(FATAL_ERROR "CMake ${CMAKE_VERSION} cannot ask the cards of this machine: set PYGGML_SPEC_CUDA_ARCHITECTURES, for "
                            "example -DPYGGML_SPEC_CUDA_ARCHITECTURES=90, or use CMake 3.24.")
    endif()
    set(CMAKE_CUDA_ARCHITECTURES "${PYGGML_SPEC_CUDA_ARCHITECTURES}")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native" AND NOT CMAKE_CUDA_ARCHITECTURES_NATIVE MATCHES "^[0-9]")
    message(FATAL_ERROR "This machine shows no NVIDIA card to build for: set PYGGML_SPEC_CUDA_ARCHITECTURES to compute capabilities "
                        "such as 90, or to default for all that upstream builds for.")
endif()

# Upstream links cuBLAS as CUDA::cublas; toolkits that are cut down to the compiler lack it, Python's packages have it.
function(pyggml_spec_find_cublas)
    if(TARGET CUDA::cublas)
        return()
    endif()
    # pip's isolated builds take the environment's own packages off sys.path, so their folder is named besides.
    execute_process(COMMAND "${Python_EXECUTABLE}" -c "import sys, sysconfig
print(';'.join(p + '/nvidia' for p in [*sys.path, sysconfig.get_path('platlib')] if p))"
        OUTPUT_VARIABLE folders OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(roots "")
    foreach(folder IN LISTS folders)
        file(GLOB found "${folder}/cu${CUDAToolkit_VERSION_MAJOR}" "${folder}/cublas")
        list(APPEND roots ${found})
    endforeach()
    find_path(PYGGML_SPEC_CUBLAS_INCLUDE cublas_v2.h HINTS ${roots} PATH_SUFFIXES include)
    find_library(PYGGML_SPEC_CUBLAS NAMES cublas "libcublas.so.${CUDAToolkit_VERSION_MAJOR}" HINTS ${roots} PATH_SUFFIXES lib)
    if(NOT PYGGML_SPEC_CUBLAS OR NOT PYGGML_SPEC_CUBLAS_INCLUDE)
        message(FATAL_ERROR "The CUDA toolkit ${CUDAToolkit_VERSION} has no cuBLAS: install it, or Python's package nvidia-cublas "
                            "of the same major version.")
    endif()
    add_library(CUDA::cublas SHARED IMPORTED GLOBAL)
    set_target_properties(CUDA::cublas PROPERTIES IMPORTED_LOCATION "${PYGGML_SPEC_CUBLAS}"
        INTERFACE_INCLUDE_DIRECTORIES "${PYGGML_SPEC_CUBLAS_INCLUDE}")
endfunction()

find_package(CUDAToolkit REQUIRED)
pyggml_spec_find_cublas()
if(TARGET CUDA::cudart_static)
    # One run-time library less to find on the user's machine.
    set_target_properties(CUDA::cudart PROPERTIES IMPORTED_LOCATION "${CUDA_cudart_static_LIBRARY}"
        INTERFACE_LINK_LIBRARIES CUDA::cudart_static)
endif()
if(NOT TARGET CUDA::cuda_driver)
    set(GGML_CUDA_NO_VMM ON)
endif()

# Upstream's own list of sources, cut down; development/dropped.cpp answers for what is missing.
function(pyggml_spec_drop_kernels)
    get_target_property(sources ggml-cuda SOURCES)
    list(FILTER sources EXCLUDE REGEX "/fattn[^/]*\\.cu$")
    list(FILTER sources EXCLUDE REGEX "/mmq-instance-(iq1|iq2|iq3|q1|q2|q3|q4_1|q5_1|mxfp4|nvfp4)[^/]*\\.cu$")
    set_target_properties(ggml-cuda PROPERTIES SOURCES "${sources}")
    target_sources(ggml-cuda PRIVATE "${vendor_dir}/ggml-spec/cuda/development/dropped.cpp")
endfunction()

# A target of its own: upstream compiles with fast arithmetic, our results are promised to a few roundings.
function(pyggml_spec_add_cuda_sources)
    if(PYGGML_SPEC_CUDA_DEVELOPMENT)
        pyggml_spec_drop_kernels()
    endif()
    file(GLOB cuda_sources CONFIGURE_DEPENDS "${vendor_dir}/ggml-spec/cuda/*.cu")
    add_library(ggml-spec-cuda OBJECT ${cuda_sources})
    target_include_directories(ggml-spec-cuda PRIVATE "${vendor_dir}/ggml-spec/include" "${upstream_dir}/ggml/include")
    target_compile_features(ggml-spec-cuda PRIVATE cuda_std_17)
    target_compile_options(ggml-spec-cuda PRIVATE -lineinfo -Xcompiler -Wall,-Wextra)
    target_include_directories(ggml-cuda PRIVATE "${vendor_dir}/ggml-spec/cuda")
    target_sources(ggml-cuda PRIVATE $<TARGET_OBJECTS:ggml-spec-cuda>)
endfunction()
